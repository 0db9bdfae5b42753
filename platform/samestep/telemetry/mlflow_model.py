"""Packs the final and the best model for MLflow, with signature, into the run directory.

It happens in a worker, which has the live model; the MLflow sink uploads the packages when it can.
So a server that is away costs the worker nothing, and the models arrive later.
"""

from __future__ import annotations

import copy
import inspect
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from samestep.checkpoint.storage import Storage
from samestep.exact.seeds import global_generators_kept
from samestep.names import BEST_MODEL_DIR, MODEL_DIR
from samestep.scratch import scratch_folder
from samestep.telemetry.finished import Finished
from samestep.telemetry.mlflow_client import load_mlflow

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Example:
    """What a model was called with once, and what it gave.

    Attributes:
        args: positional arguments, tensors of any shape with the batch first.
        kwargs: arguments by name.
        output: what forward returned.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any


def model_keeper(run_uri: str, say: Callable[[str], object]) -> Callable[[Finished], None]:
    """What a launcher gives its workers to call once with what the run ends with; never raises.

    Args:
        run_uri: the run directory.
        say: tells whoever follows the run what went wrong.
    """

    def keep(end: Finished) -> None:
        run = Storage.at(run_uri)
        code = [end.code] if end.code else []
        example: Example | None = None

        def final() -> None:
            nonlocal example
            example = example_of(end.model, end.use)
            pack_model(run, MODEL_DIR, end.model, example, code=code)

        def best() -> None:
            weights = end.best_weights()
            if weights is None:  # of an earlier end of this run, which went on
                run.delete(BEST_MODEL_DIR)
                return
            model = copy.deepcopy(end.model)
            model.load_state_dict(weights)
            pack_model(run, BEST_MODEL_DIR, model, example, code=code)

        for what, pack in (("final", final), ("best", best)):
            try:
                pack()
            except Exception as error:  # the run is done: nothing about MLflow may fail it now
                logger.warning("the %s model is not packed for MLflow", what, exc_info=True)
                text = str(error).strip().partition("\n")[0]
                say(f"the {what} model does not go to MLflow ({type(error).__name__}: {text})")

    return keep


def example_of(model: nn.Module, use: Callable[[], object]) -> Example | None:
    """Watches a model while `use` calls it (as the workload does); None where it never did.

    The model is in evaluation mode meanwhile; its buffers and all generators stay as they were.
    """
    seen: list[Example] = []

    def watch(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not seen:
            seen.append(Example(args=args, kwargs=kwargs, output=output))

    training = [module for module in model.modules() if module.training]
    handle = model.register_forward_hook(watch, with_kwargs=True)
    try:
        model.eval()
        with torch.no_grad(), global_generators_kept():
            use()
    finally:
        handle.remove()
        for module in training:
            module.training = True
    return seen[0] if seen else None


def pack_model(
    run: Storage,
    name: str,
    model: nn.Module,
    example: Example | None,
    *,
    code: Sequence[Path] = (),
) -> None:
    """Writes a folder into the run directory, over an earlier one of that name.

    A model that `torch.export` can trace, and that takes tensors by position, is kept as a graph,
    which loads without the workload's code and without running any; others are pickled, with the
    workload's files beside.

    Args:
        run: the run directory.
        name: of the folder.
        model: the trained model, without any wrapper; not changed.
        example: a call of it, which gives the signature; None: there is none to be had.
        code: files and folders that define the model.
    """
    mlflow = load_mlflow()
    import mlflow.pytorch as flavor

    mine = copy.deepcopy(model).cpu().eval()
    with scratch_folder("model") as temporary:
        folder = temporary / name
        settings: dict[str, Any] = {
            "signature": _signature(mlflow, model, example),
            "pip_requirements": _requirements(),
        }
        if not _traced(flavor, mine, folder, example, settings):
            flavor.save_model(
                mine,
                str(folder),
                serialization_format="pickle",
                code_paths=[str(path) for path in code] or None,
                input_example=None if example is None else _example_inputs(model, example),
                **settings,
            )
        run.delete(name)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        # The file that tells a package is written last: without it there is none.
        for path in sorted(files, key=lambda file: file.name == "MLmodel"):
            run.write(f"{name}/{path.relative_to(folder).as_posix()}", path.read_bytes())


def _traced(
    flavor: Any,
    model: nn.Module,
    folder: Path,
    example: Example | None,
    settings: Mapping[str, Any],
) -> bool:
    if example is None or example.kwargs or not example.args:
        return False
    if not all(isinstance(value, Tensor) for value in example.args):
        return False
    # MLflow keeps the example with the model: two samples suffice. Only an array, and only one,
    # makes a model that MLflow's generic loader serves.
    inputs: Any = tuple(value.detach().cpu() for value in example.args)
    if len(inputs) == 1 and inputs[0].dtype != torch.bfloat16 and inputs[0].dim():
        inputs = inputs[0][:2].numpy()
    try:
        flavor.save_model(
            model, str(folder), serialization_format="pt2", input_example=inputs, **settings
        )
    except Exception as error:  # whatever keeps a model from being traced, pickling is left
        logger.info("the model can't be kept as a graph (%s); it is pickled", error)
        shutil.rmtree(folder, ignore_errors=True)
        return False
    return True


def _signature(mlflow: Any, model: nn.Module, example: Example | None) -> Any:
    """Names, dtypes and shapes of inputs and outputs; the first dimension may be any."""
    if example is None:
        return None
    inputs = _arrays(_named_inputs(model, example))
    outputs = _arrays(example.output)
    if inputs is None:
        return None
    return mlflow.models.infer_signature(inputs, outputs)


def _example_inputs(model: nn.Module, example: Example) -> Any:
    """Two samples of the inputs as arrays, by name where there are several."""
    found = _arrays(_named_inputs(model, example))
    if isinstance(found, Mapping):
        return {name: _two_samples(value) for name, value in found.items()}
    return _two_samples(found)


def _two_samples(value: Any) -> Any:
    return value[:2] if getattr(value, "ndim", 0) else value


def _named_inputs(model: nn.Module, example: Example) -> Any:
    if len(example.args) == 1 and not example.kwargs:
        return example.args[0]
    bound = inspect.signature(model.forward).bind(*example.args, **example.kwargs)
    return dict(bound.arguments)


def _arrays(value: Any) -> Any:
    """Tensors as arrays that MLflow knows; None where there is nothing to describe."""
    if isinstance(value, Tensor):
        known = value.float() if value.dtype in (torch.bfloat16, torch.float16) else value
        return known.detach().cpu().numpy()
    if isinstance(value, Mapping):
        named = {str(key): _arrays(item) for key, item in value.items()}
    elif isinstance(value, list | tuple):
        named = {f"output_{place}": _arrays(item) for place, item in enumerate(value)}
    else:
        return None
    return {key: item for key, item in named.items() if item is not None} or None


def _requirements() -> list[str]:
    return [f"{name}=={metadata.version(name)}" for name in ("torch", "numpy")]
