"""Small typed JSON: gives back exactly what was put in, or refuses it with the path to it.

Plain JSON loses types (a `Counter` gets string keys, a tuple becomes a list, infinity is no
JSON). Here None, bool, str, int, finite floats, lists and dicts with string keys are written as
they are; everything else becomes an object `{"$": kind, ...}`. Nothing is ever constructed from
a name found in a file: the kinds are a closed list. Two references to one object come back as
two equal objects.
"""

from __future__ import annotations

import base64
import json
import math
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NoReturn

import numpy as np
import torch
from torch import Tensor

from samestep.checkpoint.strict_json import parse_json
from samestep.errors import CheckpointError

KIND: Final = "$"
_MAX_DEPTH: Final = 100
_MAX_ARRAY_BYTES: Final = 1 << 20
_PLAIN_INT_BITS: Final = 63
_MALFORMED: Final = (
    *(KeyError, TypeError, ValueError, AttributeError, ArithmeticError, RuntimeError),
    struct.error,
)
_KEEPABLE: Final = (
    "None, bool, int, float, str, bytes, complex, list, tuple, dict, OrderedDict, Counter, set, "
    "frozenset, NumPy numbers and small arrays, tensors, torch.Size, torch.dtype, torch.device"
)


@dataclass(frozen=True)
class TensorRef:
    """Stands in a value for the tensor of that name, which is kept apart."""

    name: str


def encode(value: Any, *, tensors: dict[str, Tensor] | None = None, path: str = "") -> Any:
    """Turns a value into what `json` can write.

    Args:
        value: see the module's docstring for what it may hold.
        tensors: where tensors found in `value` are put, under names of the form
            `values/<path>`; None: a tensor is refused.
        path: what leads to `value`, for messages and names.

    Raises:
        CheckpointError: something can't be kept; names the path to it and what to do.
    """
    return _Encoder(tensors=tensors, canonical=False).encode(value, path, ())


def decode(data: Any, *, tensors: Mapping[str, Tensor] | None = None) -> Any:
    """The value that `encode` was given; `tensors` is where it put the tensors.

    Raises:
        CheckpointError: `data` was not written by `encode`, or a tensor is missing.
    """
    if type(data) is list:
        return [decode(item, tensors=tensors) for item in data]
    if type(data) is not dict:
        return data
    if KIND not in data:
        return {key: decode(item, tensors=tensors) for key, item in data.items()}
    kind = data[KIND]
    try:
        if kind == "tensor":
            if tensors is None or data["name"] not in tensors:
                raise CheckpointError(f"tensor {data['name']!r} is missing from the tensors file")
            return tensors[data["name"]]
        if kind in _FROM_ITEMS:
            return _FROM_ITEMS[kind](decode(item, tensors=tensors) for item in data["items"])
        if kind in _FROM_DATA:
            return _FROM_DATA[kind](data)
    except _MALFORMED as error:
        raise CheckpointError(
            f"a value of kind {kind!r} is malformed ({type(error).__name__}: {error}): "
            f"{json.dumps(data)[:200]}"
        ) from error
    raise CheckpointError(
        f"unknown kind {kind!r} of value; this version of samestep reads "
        f"{', '.join(sorted([*_FROM_ITEMS, *_FROM_DATA, 'tensor']))}"
    )


def dumps(
    value: Any,
    *,
    tensors: dict[str, Tensor] | None = None,
    path: str = "",
    canonical: bool = False,
) -> str:
    """Strict JSON text (ASCII, one line) of `encode(value)`; equal values give equal text.

    Args:
        value: what to write.
        tensors: as in `encode`.
        path: as in `encode`.
        canonical: sorts the items of dicts too, so that the order in which they were filled
            does not show (for digests; reading it back loses that order).

    Raises:
        CheckpointError: as `encode`.
    """
    encoded = _Encoder(tensors=tensors, canonical=canonical).encode(value, path, ())
    return _text(encoded)


def loads(text: str, *, tensors: Mapping[str, Tensor] | None = None) -> Any:
    """The value whose `dumps` is `text`.

    Raises:
        CheckpointError: not strict JSON, or not written by `dumps`.
    """
    return decode(parse_json(text), tensors=tensors)


class _Encoder:
    def __init__(self, *, tensors: dict[str, Tensor] | None, canonical: bool) -> None:
        self._tensors = tensors
        self._canonical = canonical

    def encode(self, value: Any, path: str, above: tuple[int, ...]) -> Any:
        kind = type(value)
        if value is None or kind is bool or kind is str:
            return value
        if kind in _TO_DATA:
            return _TO_DATA[kind](value)
        if kind is Tensor:
            return self._tensor(value, path)
        if isinstance(value, np.generic | np.ndarray):
            return _numpy(value, path)
        if kind in (list, tuple, torch.Size, set, frozenset, dict, OrderedDict, Counter):
            if id(value) in above:
                _refuse(value, path, "it contains itself")
            if len(above) >= _MAX_DEPTH:
                _refuse(value, path, f"it lies more than {_MAX_DEPTH} levels deep")
            return self._container(value, path, (*above, id(value)))
        return _refuse(value, path, f"only these types can: {_KEEPABLE}")

    def _container(self, value: Any, path: str, above: tuple[int, ...]) -> Any:
        if isinstance(value, dict):
            return self._mapping(value, path, above)
        if isinstance(value, set | frozenset):
            members = (self.encode(item, f"{path}{{{_shown(item)}}}", above) for item in value)
            return {KIND: type(value).__name__, "items": sorted(members, key=_text)}
        items = [self.encode(item, f"{path}[{n}]", above) for n, item in enumerate(value)]
        if type(value) is list:
            return items
        return {KIND: "Size" if type(value) is torch.Size else "tuple", "items": items}

    def _mapping(self, value: dict[Any, Any], path: str, above: tuple[int, ...]) -> Any:
        plain = type(value) is dict and KIND not in value
        if plain and all(type(key) is str for key in value):
            pairs = [(key, self.encode(v, join(path, key), above)) for key, v in value.items()]
            return dict(sorted(pairs)) if self._canonical else dict(pairs)
        items = []
        for key, item in value.items():
            key_path = f"{path}{{key {_shown(key)}}}"
            encoded = self.encode(item, join(path, key), above)
            items.append([self.encode(key, key_path, above), encoded])
        if self._canonical and type(value) is not OrderedDict:
            items.sort(key=_text)
        return {KIND: type(value).__name__, "items": items}

    def _tensor(self, value: Tensor, path: str) -> Any:
        if self._tensors is None:
            _refuse(value, path, "a tensor can't stand here; keep its numbers with .tolist()")
        if value.requires_grad:
            _refuse(value, path, "it requires a gradient; keep tensor.detach() instead")
        name = f"values/{path}"
        assert name not in self._tensors, f"two tensors lie at {path}"
        self._tensors[name] = value
        return {KIND: "tensor", "name": name}


def join(path: str, key: object) -> str:
    """The path of what `key` leads to below `path`: `a.b`, `a[3]`, `a['x.y']`."""
    if isinstance(key, str) and key.isidentifier():
        return f"{path}.{key}" if path else key
    return f"{path}[{_shown(key)}]"


def _refuse(value: Any, path: str, why: str) -> NoReturn:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    raise CheckpointError(
        f"{path or 'the value'}: {_shown(value)} of type {kind} can't be "
        f"kept in a checkpoint: {why}. Leave it out of the state, or rebuild it from the job's args"
    )


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except Exception as error:  # a user's __repr__, or an integer of too many digits
        text = f"<{type(value).__name__} whose repr raised {type(error).__name__}>"
    return text if len(text) <= 200 else f"{text[:200]}..."


def _text(encoded: Any) -> str:
    return json.dumps(encoded, separators=(",", ":"), allow_nan=False)


def _int(value: int) -> Any:
    # Hexadecimal for large ones: Python limits the decimal digits it is willing to parse.
    if value.bit_length() <= _PLAIN_INT_BITS:
        return value
    return {KIND: "int", "hex": hex(value)}


def _float(value: float) -> Any:
    if math.isfinite(value):
        return value
    return {KIND: "float", "bits": struct.pack(">d", value).hex()}


def _float_of(data: Any) -> float:
    if type(data) is float:
        return data
    return float(struct.unpack(">d", bytes.fromhex(data["bits"]))[0])


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _numpy(value: np.generic | np.ndarray[Any, Any], path: str) -> Any:
    dtype = value.dtype
    if type(value) is not np.ndarray and not isinstance(value, np.generic):
        _refuse(value, path, "only plain NumPy arrays can; use numpy.asarray")
    if dtype.hasobject or dtype.names is not None or dtype.subdtype is not None:
        _refuse(value, path, "only arrays of numbers, bools, strings and times can")
    if np.dtype(dtype.str) != dtype or value.nbytes > _MAX_ARRAY_BYTES:
        _refuse(
            value, path, f"an array may have {_MAX_ARRAY_BYTES} bytes; use torch.from_numpy(array)"
        )
    data = {"dtype": dtype.str, "data": _base64(value.tobytes())}
    if isinstance(value, np.generic):
        return {KIND: "numpy", **data}
    fortran = value.flags.f_contiguous and not value.flags.c_contiguous
    return {KIND: "ndarray", "shape": list(value.shape), "order": "F" if fortran else "C", **data}


def _array(data: Any) -> np.ndarray[Any, Any]:
    flat = np.frombuffer(base64.b64decode(data["data"], validate=True), np.dtype(data["dtype"]))
    return np.array(flat.reshape(data["shape"]), order=data["order"])


def _scalar(data: Any) -> Any:
    raw, dtype = base64.b64decode(data["data"], validate=True), np.dtype(data["dtype"])
    if dtype.itemsize == 0:  # an empty string has no bytes to be read from
        return dtype.type()
    return np.frombuffer(raw, dtype)[0]


def _dtype(data: Any) -> torch.dtype:
    dtype = vars(torch).get(data["name"])  # no getattr: it may load a part of torch by name
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{data['name']!r} is no dtype of torch")
    return dtype


def _counter(pairs: Iterable[Any]) -> Counter[Any]:
    counter: Counter[Any] = Counter()
    counter.update(dict(pairs))
    return counter


_TO_DATA: Final[Mapping[type, Callable[[Any], Any]]] = {
    int: _int,
    float: _float,
    bytes: lambda v: {KIND: "bytes", "data": _base64(v)},
    complex: lambda v: {KIND: "complex", "real": _float(v.real), "imag": _float(v.imag)},
    torch.dtype: lambda v: {KIND: "dtype", "name": str(v).removeprefix("torch.")},
    torch.device: lambda v: {KIND: "device", "name": str(v)},
    TensorRef: lambda v: {KIND: "ref", "name": v.name},
}
_FROM_DATA: Final[Mapping[str, Callable[[Any], Any]]] = {
    "int": lambda d: int(d["hex"], 16),
    "float": _float_of,
    "bytes": lambda d: base64.b64decode(d["data"], validate=True),
    "complex": lambda d: complex(_float_of(d["real"]), _float_of(d["imag"])),
    "dtype": _dtype,
    "device": lambda d: torch.device(d["name"]),
    "ref": lambda d: TensorRef(d["name"]),
    "numpy": _scalar,
    "ndarray": _array,
}
_FROM_ITEMS: Final[Mapping[str, Callable[[Iterable[Any]], Any]]] = {
    "tuple": tuple,
    "Size": torch.Size,
    "set": set,
    "frozenset": frozenset,
    "dict": dict,
    "OrderedDict": OrderedDict,
    "Counter": _counter,
}
