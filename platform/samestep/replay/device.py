"""The device that a run's steps are taken on again: of the kind that it was trained on."""

from __future__ import annotations

import torch

from samestep.errors import InputError
from samestep.spec import JobSpec


def device_of(spec: JobSpec, *, advice: str) -> torch.device:
    """The CPU, or the present GPU.

    Args:
        spec: the job.
        advice: what to do where there is no GPU.

    Raises:
        InputError: the run was trained on a GPU, and there is none.
    """
    if not spec.resources.gpu:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise InputError(
            "the run was trained on a GPU (resources.gpu is 1), and there is none here: " + advice
        )
    return torch.device("cuda", torch.cuda.current_device())
