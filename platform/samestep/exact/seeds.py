"""Streams of randomness: every generator in use is seeded from what is computed, not where.

torch's CPU generator looks at the low 32 bits of a seed only, so keys are hashed rather than
packed: neighbouring steps and shards must not share a stream.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum

import numpy as np
import torch


class Purpose(StrEnum):
    """What a stream is for; two purposes never share one."""

    INIT = "init"
    ORDER = "order"
    ITEM = "item"
    COLLATE = "collate"
    BEFORE_STEP = "before_step"
    FORWARD = "forward"
    OPTIMIZER = "optimizer"
    EVALUATION = "evaluation"
    HOOK = "hook"
    AUDIT = "audit"
    FINGERPRINT = "fingerprint"


def stream_key(seed: int, purpose: Purpose, *indices: int) -> bytes:
    """32 bytes that depend on every argument (BLAKE2b, RFC 7693)."""
    text = ":".join((purpose.value, str(seed), *map(str, indices)))
    return hashlib.blake2b(text.encode(), digest_size=32, person=b"samestep").digest()


def torch_seed(key: bytes) -> int:
    """A 63-bit seed for a torch generator."""
    return int.from_bytes(key[:8], "little") >> 1


def generator(seed: int, purpose: Purpose, *indices: int) -> torch.Generator:
    """A CPU generator of its own for one stream."""
    made = torch.Generator()
    made.manual_seed(torch_seed(stream_key(seed, purpose, *indices)))
    return made


def seed_everything(
    seed: int, purpose: Purpose, *indices: int, device: torch.device | None = None
) -> None:
    """Seeds the global generators of torch (CPU and `device`), NumPy and Python.

    The global generators belong to the process: two threads that both draw from them are not
    exact, whatever they are seeded with.
    """
    key = stream_key(seed, purpose, *indices)
    torch.default_generator.manual_seed(torch_seed(key))
    if device is not None and device.type == "cuda":
        index = torch.cuda.current_device() if device.index is None else device.index
        torch.cuda.init()
        torch.cuda.default_generators[index].manual_seed(torch_seed(key))
    np.random.seed(np.frombuffer(key[8:24], dtype=np.uint32))
    random.seed(int.from_bytes(key[24:], "little"))


@contextmanager
def global_generators_kept() -> Iterator[None]:
    """Puts the global CPU generators back afterwards (for callers that live on, as notebooks)."""
    torch_state = torch.get_rng_state()
    numpy_state = np.random.get_state()
    python_state = random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        np.random.set_state(numpy_state)
        random.setstate(python_state)
