"""What is compared after each step: hashes of all state, and the loss to the bit."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

Observation = dict[str, str]


def observe(
    model: nn.Module, optimizer: Any, scheduler: Any, scaler: Any, loss: float
) -> Observation:
    """Hashes by kind of state; they see names, dtypes, shapes and every bit of the values."""
    return {
        "weights": sha(model.named_parameters()),
        "buffers": sha(model.named_buffers()),
        "optimizer": sha(entries(optimizer.state_dict()["state"])),
        "rates": repr([group.get("lr") for group in optimizer.param_groups]),
        "scheduler": "" if scheduler is None else repr(scheduler.last_epoch),
        "scaler": repr(scaler.state_dict()) if scaler is not None else "{}",
        "loss": loss.hex(),
    }


def sha(tensors: Iterable[tuple[str, Tensor]]) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors, key=lambda item: item[0]):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        plain = tensor.detach().contiguous().reshape(-1)
        digest.update(plain.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def entries(state: Mapping[Any, Mapping[str, Any]]) -> Iterable[tuple[str, Tensor]]:
    for index, values in state.items():
        for key, value in values.items():
            if value is not None:
                yield f"{index}/{key}", torch.as_tensor(value)
