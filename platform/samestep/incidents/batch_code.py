"""Batches as data: what a shard computed on, in a form that can be kept and given back.

Every value becomes an object that names its kind, so that nothing is mistaken for anything else.
Classes are named by module and name, and rebuilt only where the reader's own workload modules
have a class of that name and sort: reading a file never imports or calls anything else.
"""

from __future__ import annotations

import dataclasses
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from samestep.checkpoint.encode import dumps, encode, loads
from samestep.errors import CheckpointError

KIND: Final = "kind"
CLASS: Final = "class"
_PLAIN_ARRAYS: Final = "biufc"
"""Kinds of NumPy dtypes that a tensor can hold the bytes of."""


def encode_batch(batch: Any) -> tuple[str, dict[str, Tensor]]:
    """A batch as JSON text, and its tensors by name.

    Raises:
        CheckpointError: something in it can't be kept; names the path to it.
    """
    tensors: dict[str, Tensor] = {}
    return dumps(_plain(batch, "batch"), tensors=tensors, path="batch"), tensors


def decode_batch(text: str, tensors: Mapping[str, Tensor], *, modules: Collection[str]) -> Any:
    """The batch that `encode_batch` was given.

    Args:
        text: its JSON.
        tensors: by the names that `encode_batch` gave.
        modules: names of loaded modules whose named tuples and dataclasses may be rebuilt.

    Raises:
        CheckpointError: malformed, or of a class that these modules don't have.
    """
    return _rebuilt(loads(text, tensors=tensors), frozenset(modules))


def _plain(value: Any, path: str) -> dict[str, Any]:
    if isinstance(value, Tensor):
        return {KIND: "tensor", "grad": value.requires_grad, "value": value.detach()}
    if isinstance(value, np.ndarray) and value.dtype.kind in _PLAIN_ARRAYS:
        raw = bytearray(np.ascontiguousarray(value).tobytes())
        return {
            KIND: "array",
            "dtype": value.dtype.str,
            "shape": list(value.shape),
            "fortran": value.flags.f_contiguous and not value.flags.c_contiguous,
            "value": torch.tensor(raw, dtype=torch.uint8),
        }
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        named = dict(zip(value._fields, value, strict=True))
        return _of_class("named_tuple", value, named, path)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        return _of_class("dataclass", value, fields, path)
    kind = type(value)
    if kind in (list, tuple):
        items = [_plain(item, f"{path}[{n}]") for n, item in enumerate(value)]
        return {KIND: kind.__name__, "items": items}
    if kind in (dict, OrderedDict):
        pairs = [[key, _plain(item, f"{path}[{key!r}]")] for key, item in value.items()]
        return {KIND: kind.__name__, "items": pairs}
    encode(value, tensors={}, path=path)  # refused by its own path
    return {KIND: "value", "value": value}


def _of_class(kind: str, value: Any, fields: Mapping[str, Any], path: str) -> dict[str, Any]:
    cls = type(value)
    return {
        KIND: kind,
        CLASS: [cls.__module__, cls.__qualname__],
        "items": [[name, _plain(item, f"{path}.{name}")] for name, item in fields.items()],
    }


def _rebuilt(data: Any, modules: frozenset[str]) -> Any:
    try:
        kind = data[KIND]
        make = _MAKERS.get(kind)
        if make is None:
            raise CheckpointError(f"a batch holds a value of unknown kind {kind!r}")
        return make(data, modules)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"a batch is malformed ({type(error).__name__}: {error})") from error


def _tensor(data: Any, modules: frozenset[str]) -> Tensor:
    value = data["value"]
    if not isinstance(value, Tensor):
        raise CheckpointError(f"a batch should have a tensor, but has a {type(value).__name__}")
    return value.requires_grad_() if data["grad"] is True else value


def _array(data: Any, modules: frozenset[str]) -> np.ndarray[Any, Any]:
    dtype = np.dtype(str(data["dtype"]))
    if dtype.kind not in _PLAIN_ARRAYS:
        raise CheckpointError(f"a batch holds an array of dtype {dtype}")
    raw = data["value"].contiguous().numpy().tobytes()
    array = np.frombuffer(bytearray(raw), dtype=dtype).reshape([int(n) for n in data["shape"]])
    return np.asfortranarray(array) if data["fortran"] is True else array


def _named_tuple(data: Any, modules: frozenset[str]) -> Any:
    cls = _class_of(data, modules)
    if not (issubclass(cls, tuple) and hasattr(cls, "_fields")):
        raise CheckpointError(f"{data[CLASS]} is no named tuple")
    fields = _fields(data, modules)
    if tuple(fields) != tuple(cls._fields):
        raise CheckpointError(f"{data[CLASS]} has other fields now: {', '.join(cls._fields)}")
    return tuple.__new__(cls, fields.values())


def _dataclass(data: Any, modules: frozenset[str]) -> Any:
    cls: type = _class_of(data, modules)
    if not dataclasses.is_dataclass(cls):
        raise CheckpointError(f"{data[CLASS]} is no dataclass")
    fields, known = _fields(data, modules), [field.name for field in dataclasses.fields(cls)]
    if list(fields) != known:
        raise CheckpointError(f"{data[CLASS]} has other fields now: {', '.join(known)}")
    made = object.__new__(cls)  # as it was, without running its __init__ again
    for name, value in fields.items():
        object.__setattr__(made, name, value)
    return made


def _fields(data: Any, modules: frozenset[str]) -> dict[str, Any]:
    return {str(name): _rebuilt(item, modules) for name, item in data["items"]}


def _class_of(data: Any, modules: frozenset[str]) -> Any:
    module, name = data[CLASS]
    if module not in modules or module not in sys.modules:
        raise CheckpointError(
            f"a batch holds a {module}.{name}, whose module is none of the workload's "
            f"({', '.join(sorted(modules)) or 'none'}): only their classes are rebuilt"
        )
    found: Any = sys.modules[module]
    for part in str(name).split("."):
        found = vars(found)[part]
    if not isinstance(found, type) or found.__module__ != module:
        raise CheckpointError(f"{module}.{name} is no class of that module")
    return found


_MAKERS: Final[dict[str, Callable[[Any, frozenset[str]], Any]]] = {
    "tensor": _tensor,
    "array": _array,
    "named_tuple": _named_tuple,
    "dataclass": _dataclass,
    "list": lambda data, modules: [_rebuilt(item, modules) for item in data["items"]],
    "tuple": lambda data, modules: tuple(_rebuilt(item, modules) for item in data["items"]),
    "dict": lambda data, modules: {k: _rebuilt(v, modules) for k, v in data["items"]},
    "OrderedDict": lambda data, modules: OrderedDict(
        (k, _rebuilt(v, modules)) for k, v in data["items"]
    ),
    "value": lambda data, modules: data["value"],
}
