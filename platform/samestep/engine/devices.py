"""What this process's devices hold and do, for display."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

import torch

from samestep.telemetry.node_load import GpuLoad

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"


def memory(device: torch.device) -> tuple[int, int]:
    """The most that was allocated, and all there is, in bytes; zeros without a GPU."""
    if device.type != "cuda":
        return 0, 0
    total = torch.cuda.get_device_properties(device).total_memory
    return torch.cuda.max_memory_allocated(device), int(total)


def gpu_loads(devices: Sequence[torch.device]) -> list[GpuLoad]:
    """What the GPUs among the devices are doing, whoever uses them; nothing without one."""
    return [_load(device) for device in devices if device.type == "cuda"]


def _load(device: torch.device) -> GpuLoad:
    free, total = torch.cuda.mem_get_info(device)
    index = device.index if device.index is not None else torch.cuda.current_device()
    return GpuLoad(
        index=physical_index(index, os.environ.get(VISIBLE)),
        memory_bytes=int(total - free),
        memory_limit_bytes=int(total),
        busy_percent=_busy_percent(device),
    )


def physical_index(index: int, visible: str | None) -> int:
    """The number that the machine gives to a device that this process sees as number `index`.

    Args:
        index: as torch counts.
        visible: CUDA_VISIBLE_DEVICES; None where it is not set. Where it names devices by their
            UUID, torch's own numbers stay.
    """
    named = [part.strip() for part in (visible or "").split(",")]
    if index < len(named) and named[index].isdecimal():
        return int(named[index])
    return index


def _busy_percent(device: torch.device) -> float | None:
    """Share of the last second in which a kernel ran; None where NVML does not tell."""
    try:
        return float(torch.cuda.utilization(device))
    except Exception:  # its Python module is absent, or whatever that raises: for display only
        return None
