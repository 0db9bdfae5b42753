"""The samples of one step in a bundle: each shard's batch as `collate` made it, or why it lacks.

`samples/step-00000012.json` holds which samples each shard takes and everything that is no
tensor; the tensors lie beside it in safetensors, with their strides in the JSON: kernels are
chosen by them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from safetensors.torch import load, save
from torch import Tensor

from samestep.checkpoint.layout import Layout, from_stored, to_stored
from samestep.errors import BundleError, CheckpointError
from samestep.exact.order import ShardPlan
from samestep.incidents import strict_json as strict
from samestep.incidents.batch_code import decode_batch, encode_batch
from samestep.incidents.bundle import sample_file
from samestep.incidents.spread import check_layout, is_compact

FORMAT: Final = 1
MAX_SHARDS: Final = 4096
MAX_IDS: Final = 1 << 26


@dataclass(frozen=True, kw_only=True)
class ShardSamples:
    """What is kept of a shard.

    Attributes:
        plan: which samples it takes.
        text: its batch as `encode_batch` gave it; None where it is not here.
        layouts: dtype, shape and strides of each of its tensors.
        why: why the batch is not here.
    """

    plan: ShardPlan
    text: str | None = None
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    why: str = ""


class StepSamples:
    """The shards of a step; their tensors are held, or read when they are asked for.

    Args:
        shards: in order.
        stored: tensors as files hold them, by `<shard>/<name>`.
    """

    def __init__(self, shards: Sequence[ShardSamples], stored: Mapping[str, Tensor]) -> None:
        self.shards = list(shards)
        self.stored = dict(stored)

    @classmethod
    def of(cls, taken: Sequence[tuple[ShardPlan, Any, str]]) -> StepSamples:
        """From each shard's plan, batch, and why there is none (then the batch is not looked at).

        A batch that can't be kept is told like one that could not be read.
        """
        shards: list[ShardSamples] = []
        stored: dict[str, Tensor] = {}
        for plan, batch, why in taken:
            if why or not plan.ids:
                shards.append(ShardSamples(plan=plan, why=why))
                continue
            try:
                text, tensors = encode_batch(batch)
                kept = {name: _stored(name, tensor) for name, tensor in tensors.items()}
            except CheckpointError as error:
                shards.append(ShardSamples(plan=plan, why=f"it can't be kept: {error}"))
                continue
            layouts = {name: layout for name, (layout, _) in kept.items()}
            shards.append(ShardSamples(plan=plan, text=text, layouts=layouts))
            stored |= {f"{plan.shard}/{name}": tensor for name, (_, tensor) in kept.items()}
        return cls(shards, stored)

    @property
    def num_bytes(self) -> int:
        """Of the tensors and the texts."""
        return sum(tensor.nbytes for tensor in self.stored.values()) + sum(
            len(shard.text or "") for shard in self.shards
        )

    @property
    def is_whole(self) -> bool:
        """Whether every shard that has samples has its batch."""
        return all(shard.text is not None for shard in self.shards if shard.plan.ids)

    def without_batches(self, why: str) -> StepSamples:
        """The plans alone."""
        shards = [ShardSamples(plan=s.plan, why=why if s.plan.ids else "") for s in self.shards]
        return StepSamples(shards, {})

    def to_files(self, redact: Callable[[str], str] = str) -> dict[str, bytes]:
        """The two files, by name; the second only where there are tensors."""
        step = self.shards[0].plan.step
        data = {
            "format": FORMAT,
            "step": step,
            "shards": [_shard_to_json(shard, redact) for shard in self.shards],
        }
        found = {sample_file(step, "json"): json.dumps(data, separators=(",", ":")).encode("ascii")}
        if self.stored:
            found[sample_file(step, "safetensors")] = save(self.stored)
        return found

    @classmethod
    def from_files(cls, text: bytes, tensors: bytes | None, *, step: int) -> StepSamples:
        """Inverse of `to_files`.

        Raises:
            BundleError: malformed, or of another step.
        """
        what = f"the samples of step {step}"
        kinds = {"format": int, "step": int, "shards": list}
        data = strict.fields(strict.read_json(text, what), what, kinds)
        if data["format"] != FORMAT:
            raise BundleError(
                f"{what} have format {data['format']}; this version of samestep reads {FORMAT}"
            )
        if data["step"] != step:
            raise BundleError(f"{what} are those of step {data['step']}")
        listed = strict.items(data["shards"], what, dict, limit=MAX_SHARDS)
        shards = [_shard_of(item, step, place) for place, item in enumerate(listed)]
        stored: dict[str, Tensor] = {}
        if tensors is not None:
            with strict.refusing(what):
                stored = load(tensors)
        wanted = {f"{s.plan.shard}/{name}" for s in shards for name in s.layouts}
        if wanted != set(stored) or not shards:
            raise BundleError(f"{what}: the tensors are not those that are named")
        return cls(shards, stored)

    def batch(self, shard: int, *, modules: Collection[str]) -> Any:
        """A shard's batch, in new objects.

        Args:
            shard: its index; one that has a text.
            modules: loaded modules whose named tuples and dataclasses may be rebuilt.

        Raises:
            BundleError: malformed, or of a class that these modules don't have.
        """
        kept = self.shards[shard]
        assert kept.text is not None, kept.why
        with strict.refusing(f"the batch of step {kept.plan.step}, shard {shard}"):
            tensors = {
                name: _restored(name, self.stored[f"{shard}/{name}"], layout)
                for name, layout in kept.layouts.items()
            }
            return decode_batch(kept.text, tensors, modules=modules)


def _stored(name: str, tensor: Tensor) -> tuple[Layout, Tensor]:
    """The layout to be given back, and what the file holds: an expanded dimension once."""
    strides, shape = tensor.stride(), tensor.shape
    for dim, (stride, size) in enumerate(zip(strides, shape, strict=True)):
        if stride == 0 and size > 1:
            tensor = tensor.narrow(dim, 0, 1)
    layout = Layout.of(tensor, name=name)
    if not is_compact(layout):
        layout = Layout.of(tensor.contiguous(), name=name)
        strides = tuple(
            0 if s == 0 else new for s, new in zip(strides, layout.strides, strict=True)
        )
    # A copy: two that share memory would not be written.
    told = Layout(dtype=layout.dtype, shape=tuple(shape), strides=tuple(strides))
    return told, to_stored(tensor).clone()


def _restored(name: str, stored: Tensor, layout: Layout) -> Tensor:
    pairs = list(zip(layout.shape, layout.strides, strict=True))
    base = Layout(
        dtype=layout.dtype,
        shape=tuple(1 if stride == 0 and size > 1 else size for size, stride in pairs),
        strides=tuple(1 if stride == 0 and size > 1 else stride for size, stride in pairs),
    )
    check_layout(base, name=name)
    if math.prod(layout.shape) > MAX_IDS * 64:
        raise CheckpointError(f"{name}: {layout} has too many elements")
    made = from_stored(stored, base, name=name)
    return made if base.shape == layout.shape else made.expand(layout.shape)


def _shard_to_json(shard: ShardSamples, redact: Callable[[str], str]) -> dict[str, Any]:
    plan = shard.plan
    return {
        "shard": plan.shard,
        "epoch": plan.epoch,
        "positions": [plan.positions.start, plan.positions.stop],
        "ids": list(plan.ids),
        "batch": shard.text,
        "layouts": {
            name: [layout.dtype, list(layout.shape), list(layout.strides)]
            for name, layout in shard.layouts.items()
        },
        "why": redact(shard.why),
    }


_SHARD: Final[Mapping[str, strict.Kinds]] = {
    "shard": int,
    "epoch": int,
    "positions": list,
    "ids": list,
    "batch": (str, type(None)),
    "layouts": dict,
    "why": str,
}


def _shard_of(data: Any, step: int, place: int) -> ShardSamples:
    what = f"shard {place} of step {step}"
    strict.fields(data, what, _SHARD)
    ids = [strict.count(n, what) for n in strict.items(data["ids"], what, int, limit=MAX_IDS)]
    ends = [strict.count(n, what) for n in strict.items(data["positions"], what, int, limit=2)]
    if data["shard"] != place or len(ends) != 2 or ends[1] - ends[0] != len(ids):
        raise BundleError(f"{what} does not fit its place, or its number of samples")
    if data["batch"] is None and (data["layouts"] or (ids and not data["why"])):
        raise BundleError(f"{what} has no batch, and does not say why")
    plan = ShardPlan(
        step=step,
        epoch=strict.count(data["epoch"], what),
        shard=place,
        positions=range(*ends),
        ids=tuple(ids),
    )
    layouts = {name: _layout_of(item, what) for name, item in data["layouts"].items()}
    return ShardSamples(plan=plan, text=data["batch"], layouts=layouts, why=data["why"])


def _layout_of(data: Any, what: str) -> Layout:
    parts = strict.items(data, what, (str, list), limit=3)
    if len(parts) != 3 or type(parts[0]) is not str:
        raise BundleError(f"{what} has a malformed layout")
    shape, strides = ([strict.count(n, what) for n in _numbers(part, what)] for part in parts[1:])
    if len(shape) != len(strides):
        raise BundleError(f"{what} has a malformed layout")
    return Layout(dtype=parts[0], shape=tuple(shape), strides=tuple(strides))


def _numbers(data: Any, what: str) -> list[Any]:
    return strict.items(data, what, int, limit=64)
