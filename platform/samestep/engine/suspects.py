"""State in Python objects that a forward changes: no checkpoint holds it, no worker shares it.

A counter in a module, a private generator, a cache: each worker has its own, which knows only the
shards that this worker took.
"""

from __future__ import annotations

import random
import types
from collections.abc import Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from samestep.exact.digest import tensor_bytes

MAX_DEPTH: Final = 6
MAX_ITEMS: Final = 1000
MAX_SHOWN: Final = 60

_OF_EVERY_MODULE: Final = frozenset(vars(nn.Module())) | {"_compiled_call_impl"}
_OPAQUE: Final = (type, types.ModuleType, types.FunctionType, types.MethodType, nn.Module)


@dataclass(kw_only=True)
class Snapshot:
    """Attributes of a workload, its modules and its dataset at one moment.

    Attributes:
        values: by path; text for plain values, a digest for what is larger.
        generators: kinds of private random generators, by path.
    """

    values: dict[str, str] = field(default_factory=dict)
    generators: dict[str, str] = field(default_factory=dict)


def take_snapshot(roots: Mapping[str, Any]) -> Snapshot:
    """Takes down what plain Python objects hold; tensors that the modules register are left out.

    Args:
        roots: objects by the name that paths start with. Of a module all submodules are taken.
    """
    made = Snapshot()
    registered: set[int] = set()
    for root in roots.values():
        if isinstance(root, nn.Module):
            registered |= {id(tensor) for tensor in (*root.parameters(), *root.buffers())}
    walk = _Walk(made, registered)
    for name, root in roots.items():
        if isinstance(root, nn.Module):
            for path, module in root.named_modules():
                attributes = {
                    key: value for key, value in vars(module).items() if key not in _OF_EVERY_MODULE
                }
                walk.items(f"{name}.{path}" if path else name, attributes.items(), 0)
        else:
            walk.value(name, root, 0)
    return made


def changes(before: Snapshot, after: Snapshot) -> dict[str, str]:
    """What differs between two snapshots: "3 became 4" by path."""
    paths = sorted({*before.values, *after.values})
    return {
        path: f"{before.values.get(path, 'nothing')} became {after.values.get(path, 'nothing')}"
        for path in paths
        if before.values.get(path) != after.values.get(path)
    }


def parameters_beside(workload: object, model: nn.Module) -> tuple[str, ...]:
    """Paths of parameters that require a gradient, held by a workload, but not by its model."""
    own = {id(parameter) for parameter in model.parameters()}
    return tuple(
        f"{path}.{name}" if name else path
        for path, value in vars(workload).items()
        for name, parameter in _parameters_of(value)
        if parameter.requires_grad and id(parameter) not in own
    )


class _Walk:
    def __init__(self, made: Snapshot, registered: set[int]) -> None:
        self._made = made
        self._registered = registered
        self._open: set[int] = set()

    def value(self, path: str, value: Any, depth: int) -> None:
        """Takes one value down, and what it holds."""
        if value is None or isinstance(value, bool | int | float | complex | str | bytes):
            self._made.values[path] = _shown(value)
        elif isinstance(value, Tensor):
            if id(value) not in self._registered and value.layout is torch.strided:
                kind = f"tensor {tuple(value.shape)}"
                self._made.values[path] = f"{kind} {_digest(tensor_bytes(value).tobytes())}"
        elif isinstance(value, np.ndarray):
            if not value.dtype.hasobject:
                self._made.values[path] = f"array {value.shape} {_digest(value.tobytes())}"
        elif (state := _generator_state(value)) is not None:
            self._made.generators[path] = type(value).__module__ + "." + type(value).__qualname__
            self._made.values[path] = f"{type(value).__name__} in state {_digest(state)}"
        elif isinstance(value, np.generic):
            self._made.values[path] = _shown(value.item())
        elif not isinstance(value, _OPAQUE) and depth < MAX_DEPTH and id(value) not in self._open:
            self._open.add(id(value))
            self._inside(path, value, depth + 1)
            self._open.discard(id(value))

    def items(self, path: str, items: Any, depth: int) -> None:
        """Takes named values down."""
        for number, (key, item) in enumerate(items):
            if number == MAX_ITEMS:
                break
            self.value(f"{path}.{key}", item, depth)

    def _inside(self, path: str, value: Any, depth: int) -> None:
        if isinstance(value, Mapping):
            self._made.values[f"len({path})"] = str(len(value))
            self.items(path, value.items(), depth)
        elif isinstance(value, AbstractSet):
            self._made.values[path] = _shown(sorted(map(repr, value)))
        elif _is_sequence(value):
            self._made.values[f"len({path})"] = str(len(value))
            self.items(path, enumerate(value), depth)
        elif hasattr(value, "__dict__"):
            self.items(path, list(vars(value).items()), depth)


def _parameters_of(value: Any) -> list[tuple[str, nn.Parameter]]:
    if isinstance(value, nn.Parameter):
        return [("", value)]
    return list(value.named_parameters()) if isinstance(value, nn.Module) else []


def _is_sequence(value: Any) -> bool:
    from collections import deque

    return isinstance(value, list | tuple | deque)


def _generator_state(value: Any) -> bytes | None:
    if isinstance(value, torch.Generator):
        return value.get_state().numpy().tobytes()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state).encode()
    if isinstance(value, np.random.RandomState):
        return b"".join(_as_bytes(value.get_state(legacy=True)))
    if isinstance(value, random.Random):
        return repr(value.getstate()).encode()
    return None


def _as_bytes(state: Any) -> Iterator[bytes]:
    for part in state:
        yield part.tobytes() if isinstance(part, np.ndarray) else repr(part).encode()


def _shown(value: object) -> str:
    text = repr(value)
    if len(text) <= MAX_SHOWN:
        return text
    return f"{text[: MAX_SHOWN // 2]}... ({len(text)} characters, {_digest(text.encode())})"


def _digest(data: bytes) -> str:
    return xxhash.xxh3_64(data).hexdigest()
