"""What `--device` means to a command that computes in its own process."""

from __future__ import annotations

import torch

from samestep.errors import CannotReplayError, InputError


def device_of(asked: str | None, num_gpus: int) -> torch.device:
    """The device that is meant; where none is, the kind that the run had.

    Raises:
        InputError: it is no device that can be used.
        CannotReplayError: there is no such GPU here.
    """
    name = asked or ("cuda" if num_gpus else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InputError(f"--device takes cpu, cuda or cuda:N; got {name!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"--device takes cpu, cuda or cuda:N; got {name!r}")
    if device.type == "cpu":
        return device
    if not torch.cuda.is_available():
        raise CannotReplayError(
            f"--device {name}: there is no GPU here"
            if asked is not None
            else "the run was on a GPU, and there is none here: go to a machine with one, or give "
            "--device cpu, where values are held to a tolerance"
        )
    index = torch.cuda.current_device() if device.index is None else device.index
    if index >= torch.cuda.device_count():
        last = torch.cuda.device_count() - 1
        raise CannotReplayError(f"--device {name}: the last GPU here is cuda:{last}")
    return torch.device("cuda", index)
