"""Batches of any nested type: walking their tensors, moving them, and what they must look like."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from samestep.errors import BadBatchError, WorkloadError

ALIGNMENT_BYTES = 64

Signature = dict[str, tuple[str, int]]
"""(dtype, number of dimensions) of every tensor and NumPy array, by its path in the batch."""


def map_tensors(batch: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """The batch with every tensor replaced; types, keys and everything else stay."""
    if isinstance(batch, Tensor):
        return function(batch)
    if isinstance(batch, Mapping):
        items = {key: map_tensors(value, function) for key, value in batch.items()}
        if type(batch) is dict:
            return items
        if isinstance(batch, MappingProxyType):
            return MappingProxyType(items)
        if not _has_changed(batch.values(), items.values()):
            return batch
        if not isinstance(batch, MutableMapping):
            return _made(type(batch), items)
        made = _shallow_copy(batch)
        made.update(items)
        return made
    if isinstance(batch, list | tuple):
        values = [map_tensors(value, function) for value in batch]
        # A tuple that holds no tensor may be of a type that can't be made anew (torch.Size).
        if isinstance(batch, tuple) and not _has_changed(batch, values):
            return batch
        return _like(batch, values)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        made = _shallow_copy(batch)
        for field in dataclasses.fields(batch):
            value = map_tensors(getattr(batch, field.name), function)
            object.__setattr__(made, field.name, value)
        return made
    return batch


def _like(batch: Any, values: list[Any]) -> Any:
    """The values in a sequence of the batch's own type, whatever its constructor takes."""
    if type(batch) in (list, tuple):
        return type(batch)(values)
    if isinstance(batch, list):
        made = _shallow_copy(batch)
        made[:] = values
        return made
    try:
        made = tuple.__new__(type(batch), values)
        if hasattr(batch, "__dict__"):
            vars(made).update(vars(batch))
        return made
    except TypeError:  # a type of C's, such as torch.return_types.max
        return _made(type(batch), values)


def _made(kind: type[Any], content: Any) -> Any:
    try:
        return kind(content)
    except Exception as error:
        raise WorkloadError(
            f"a batch holds a {kind.__module__}.{kind.__qualname__}, which can't be made anew with "
            f"its tensors moved ({type(error).__name__}: {error}); return a dict, list, tuple, "
            "NamedTuple or dataclass from collate"
        ) from error


def _has_changed(before: Iterable[Any], after: Iterable[Any]) -> bool:
    return any(one is not other for one, other in zip(before, after, strict=True))


def tensors_of(batch: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of a batch with its path: "" for a bare one, "0", "image", "0.mask"."""
    for inner, value in _arrays_of(batch, path):
        if isinstance(value, Tensor):
            yield inner, value


def _arrays_of(batch: Any, path: str = "") -> Iterator[tuple[str, Tensor | np.ndarray[Any, Any]]]:
    if isinstance(batch, Tensor | np.ndarray):
        yield path, batch
        return
    items: list[tuple[str, Any]] = []
    if isinstance(batch, Mapping):
        items = [(str(key), value) for key, value in batch.items()]
    elif isinstance(batch, tuple) and hasattr(batch, "_fields"):
        items = list(zip(batch._fields, batch, strict=True))
    elif isinstance(batch, list | tuple):
        items = [(str(index), value) for index, value in enumerate(batch)]
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        items = [(field.name, getattr(batch, field.name)) for field in dataclasses.fields(batch)]
    for key, value in items:
        yield from _arrays_of(value, f"{path}.{key}" if path else key)


def to_device(batch: Any, device: torch.device) -> Any:
    """Moves a batch; on the CPU it makes sure that tensors start at a 64-byte boundary.

    Operands at odd offsets (views, arrays from NumPy) may take another kernel, and whether they
    lie so depends on the process that made them.
    """

    def move(tensor: Tensor) -> Tensor:
        if device.type != "cpu":
            return tensor.to(device, non_blocking=True)
        return tensor.clone() if tensor.data_ptr() % ALIGNMENT_BYTES else tensor

    return map_tensors(batch, move)


def signature(batch: Any) -> Signature:
    """What every later batch is compared with."""
    return {
        path: (
            f"{'numpy.' if isinstance(array, np.ndarray) else ''}{array.dtype}",
            array.ndim,
        )
        for path, array in _arrays_of(batch)
    }


def check_batch(
    batch: Any,
    expected: Signature,
    dimensions: Mapping[str, Sequence[int | None]],
    where: str,
) -> None:
    """Refuses a batch of another kind than the first.

    Args:
        batch: as collate made it.
        expected: signature of the first shard of the run.
        dimensions: declared dimensions by path; None is open.
        where: names the step and shard in messages.

    Raises:
        BadBatchError: another dtype, rank, declared dimension, or set of tensors.
        WorkloadError: dimensions are declared of what is not in the batch.
    """
    found = signature(batch)
    unknown = [path for path in dimensions if path not in found]
    if unknown:
        near = difflib.get_close_matches(unknown[0], found, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise WorkloadError(
            f"the workload declares dimensions of {unknown[0]!r}, which the batch of {where} does "
            f"not have; {hint}It has: {', '.join(map(repr, found)) or 'no tensor'} ('' is a bare "
            "tensor)"
        )
    if found != expected:
        lines = [
            f"{path or 'the batch'}: {_told(found.get(path))}, the first batch had "
            f"{_told(expected.get(path))}"
            for path in sorted({*found, *expected})
            if found.get(path) != expected.get(path)
        ]
        raise BadBatchError(
            f"the batch of {where} is of another kind than the first: " + "; ".join(lines)
        )
    for path, tensor in _arrays_of(batch):
        declared = dimensions.get(path)
        if declared is None:
            continue
        fits = len(declared) == tensor.ndim and all(
            want is None or want == have for want, have in zip(declared, tensor.shape, strict=False)
        )
        if not fits:
            raise BadBatchError(
                f"the batch of {where} breaks the declared dimensions: {path or 'the batch'} has "
                f"shape {tuple(tensor.shape)}, the workload declares {tuple(declared)}"
            )


def check_ranges(
    batch: Any, ranges: Mapping[str, tuple[float | None, float | None]], where: str
) -> None:
    """Refuses a batch with values that the workload says it can't have.

    Args:
        batch: as collate made it.
        ranges: least and largest value by path; None is open.
        where: names the step and shard in messages.

    Raises:
        BadBatchError: a value outside, or NaN.
        WorkloadError: a range is declared of what is not in the batch.
    """
    arrays = dict(_arrays_of(batch)) if ranges else {}
    for path, (low, high) in ranges.items():
        if path not in arrays:
            raise WorkloadError(
                f"the workload declares a range of {path!r}, which the batch of {where} does not "
                f"have. It has: {', '.join(map(repr, arrays)) or 'no tensor'}"
            )
        values = torch.as_tensor(arrays[path])
        if not values.numel():
            continue
        least, most = (float(value) for value in torch.aminmax(values))
        inside = (low is None or least >= low) and (high is None or most <= high)
        if not inside or least != least or most != most:
            raise BadBatchError(
                f"the batch of {where} breaks the declared range: {path or 'the batch'} has values "
                f"from {least:g} to {most:g}, the workload declares {_end(low)} to {_end(high)}"
            )


def _end(value: float | None) -> str:
    return "any" if value is None else f"{value:g}"


def _told(entry: tuple[str, int] | None) -> str:
    return "no tensor" if entry is None else f"{entry[0]} with {entry[1]} dimensions"


def _shallow_copy(value: Any) -> Any:
    import copy

    return copy.copy(value)
