"""Digests of tensors, sample ids and numbers: what must be equal is compared by these.

Two digests only: xxh3-128 while running and in the ledger, SHA-256 for files and for what people
compare between machines. Both see names, dtypes, shapes and values; neither sees strides, devices
or the order in which a mapping was filled.

The canonical form of a state, which `sha256_state` hashes: for each tensor, in `canonical_order`
of the names, the header `["<name>","<dtype>",[<shape>]]` (compact JSON in ASCII, then a newline)
followed by the elements in C order as they lie in memory on a little-endian machine; then the
line `["values"]` and the JSON text of everything that is no tensor, in UTF-8.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import xxhash

from samestep.errors import NotExactError

if TYPE_CHECKING:  # torch is loaded where it is used: a launcher sets the environment before
    from torch import Tensor

if sys.byteorder != "little":  # the canonical form is defined on little-endian memory
    raise ImportError("samestep keeps bits on little-endian machines only")


class _Hash(Protocol):
    def update(self, data: Any, /) -> object: ...


def canonical_order(names: Iterable[str]) -> list[str]:
    """The names sorted by code point: the one order in which states are hashed and written."""
    return sorted(names)


def live_digest(tensors: Mapping[str, Tensor]) -> str:
    """xxh3-128 (32 hex digits) of tensors where they lie.

    Any dtype and shape; strides don't matter. Contiguous CPU tensors are read in place, others
    are copied one at a time.

    Raises:
        NotExactError: a tensor has no dense storage (sparse, meta).
    """
    digest = xxhash.xxh3_128()
    _feed(digest, tensors)
    return digest.hexdigest()


def short_digest(tensor: Tensor) -> str:
    """xxh3-64 (16 hex digits) of a tensor's elements in C order; shape and dtype don't count."""
    return xxhash.xxh3_64(tensor_bytes(tensor).data).hexdigest()


def sha256_state(tensors: Mapping[str, Tensor], values_json: str) -> str:
    """SHA-256 (64 hex digits) of the canonical form that the module's docstring defines.

    Raises:
        NotExactError: a tensor has no dense storage (sparse, meta).
    """
    digest = hashlib.sha256()
    _feed(digest, tensors)
    digest.update(values_tail(values_json))
    return digest.hexdigest()


def ids_digest(shards: Sequence[Sequence[int]]) -> str:
    """xxh3-128 (32 hex digits) of a step's sample ids, cut into shards.

    Hashes the number of shards, then for each its length and its ids, all as little-endian
    int64: an empty shard counts, and so does where the cuts are.
    """
    digest = xxhash.xxh3_128()
    digest.update(np.int64(len(shards)).tobytes())
    for ids in shards:
        digest.update(np.int64(len(ids)).tobytes())
        digest.update(np.asarray(ids, dtype="<i8").tobytes())
    return digest.hexdigest()


def divergence_text(step: int, digests: Sequence[str]) -> str:
    """What is said of workers whose digests of the state differ, given by world rank."""
    common = max(sorted(set(digests)), key=digests.count)
    odd = [str(rank) for rank, other in enumerate(digests) if other != common]
    return (
        f"the state after {step} steps differs between workers; odd ones out: worker "
        f"{', '.join(odd)} (digests {list(digests)}). Nothing of it is committed: either something "
        "outside the contract changed the model (samestep check names suspects) or a machine "
        "computes wrongly"
    )


def canonical_float_hex(value: float) -> str:
    """The exact value as `float.hex` writes it; every NaN is "nan", whatever sign and payload.

    NaN's sign and payload depend on the order of operands, so they are no part of a result.
    """
    if math.isnan(value):
        return "nan"
    return float(value).hex()


def float_from_hex(text: str) -> float:
    """The number whose `canonical_float_hex` is `text`.

    Raises:
        ValueError: `text` was not written by `canonical_float_hex`.
    """
    value = float.fromhex(text)
    if canonical_float_hex(value) != text:
        raise ValueError(f"{text!r} is no canonical float, expected {canonical_float_hex(value)!r}")
    return value


def pack_float(value: float) -> dict[str, Any]:
    """A float as JSON that people can read and that gives its bits back."""
    value = float(value)
    return {"v": value if math.isfinite(value) else None, "hex": canonical_float_hex(value)}


def unpack_float(data: Mapping[str, Any]) -> float:
    """Inverse of `pack_float`."""
    return float_from_hex(data["hex"])


def tensor_bytes(tensor: Tensor) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
    """The elements in C order as raw bytes; no copy where a CPU tensor is contiguous already.

    Returns:
        1-dim array of uint8 that shares the tensor's memory, or a copy's.
    """
    import torch

    dense = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return dense.reshape(-1).view(torch.uint8).numpy()


def tensor_header(name: str, tensor: Tensor) -> str:
    """What the canonical form has before the elements of a tensor."""
    return layout_header(name, str(tensor.dtype).removeprefix("torch."), tensor.shape)


def layout_header(name: str, dtype: str, shape: Sequence[int]) -> str:
    """The same, where the tensor itself is not at hand."""
    return json.dumps([name, dtype, list(shape)], separators=(",", ":")) + "\n"


def values_tail(values_json: str) -> bytes:
    """What the canonical form has behind the last tensor."""
    return b'["values"]\n' + values_json.encode("utf-8")


def _feed(digest: _Hash, tensors: Mapping[str, Tensor]) -> None:
    import torch

    for name in canonical_order(tensors):
        tensor = tensors[name]
        if tensor.layout != torch.strided or tensor.device.type == "meta":
            raise NotExactError(
                f"can't digest {name}: layout {tensor.layout} on device {tensor.device}; only "
                "dense tensors can be compared bit by bit: use tensor.to_dense()"
            )
        digest.update(tensor_header(name, tensor).encode("ascii"))
        digest.update(tensor_bytes(tensor))
