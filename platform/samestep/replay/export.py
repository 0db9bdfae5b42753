"""Weights taken out of a checkpoint into one plain safetensors file, for anybody's torch."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from samestep.checkpoint.reading import read_at, weights_of
from samestep.errors import InputError, StorageError

_PREFIX: Final = ".samestep-export-"


@dataclass(frozen=True, kw_only=True)
class Exported:
    """What was written.

    Attributes:
        step: of the checkpoint.
        num_tensors: keys in the file.
        num_bytes: size of the file.
        averages: they are the averages of the weights, as the run evaluates them.
        left_out: keys whose value is no tensor (a module's extra state), which a file of
            tensors can't hold.
    """

    step: int
    num_tensors: int
    num_bytes: int
    averages: bool
    left_out: list[str]


def export_weights(source: str, out: Path, *, checkpoint: str, force: bool) -> Exported:
    """Writes the model's state_dict to a file that `load_state_dict(load_file(F))` takes.

    Tied weights stand under each of their keys. The file is whole or not there.

    Args:
        source: a run directory or a checkpoint's folder; a path or a URI.
        out: the file to write.
        checkpoint: of a run: "latest", "best" or a number of steps.
        force: replace a file that is there.

    Raises:
        InputError: the file exists, or a tensor is of a dtype the format can't hold.
        CheckpointError: there is no such checkpoint, or it is damaged.
        StorageError: the file can't be written.
    """
    if out.exists() and not force:
        raise InputError(f"{out} exists already; give --force to replace it, or another --out")
    if not out.absolute().parent.is_dir():
        raise InputError(f"there is no folder {out.absolute().parent} to write {out.name} to")
    state, _ = read_at(source, checkpoint)
    weights = weights_of(state, source=source)
    # A copy each: the format refuses tensors that share memory, as tied weights do.
    tensors = {
        key: value.clone().contiguous()
        for key, value in weights.items()
        if isinstance(value, Tensor)
    }
    averages = "ema" in state.values
    metadata = {
        "format": "pt",
        "samestep_step": str(state.step),
        "samestep_averages": str(averages).lower(),
    }
    temporary = out.with_name(f"{_PREFIX}{os.getpid()}-{out.name}")
    try:
        save_file(tensors, temporary, metadata=metadata)
        os.replace(temporary, out)
    except (KeyError, SafetensorError) as error:
        raise InputError(
            f"{out}: safetensors can't hold these weights ({type(error).__name__}: {error}); load "
            "them with samestep.load_weights instead"
        ) from error
    except OSError as error:
        raise StorageError(f"can't write {out}: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)
    return Exported(
        step=state.step,
        num_tensors=len(tensors),
        num_bytes=out.stat().st_size,
        averages=averages,
        left_out=[key for key in weights if key not in tensors],
    )
