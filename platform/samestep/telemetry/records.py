"""The lines of the ledger: one per step, one per event.

Every float is kept bit-exact: `{"v": 0.5, "hex": "0x1.0000000000000p-1"}`, readable beside exact.
NaN and the infinities have `"v": null`; a NaN's sign and payload are dropped, since they depend on
the order of operands. Timings are plain numbers: they are never compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, Final

from samestep.errors import StorageError
from samestep.exact.digest import canonical_float_hex, pack_float, unpack_float
from samestep.names import Event

STEP: Final = "step"
EVENT: Final = "event"

KINDS: Final[Mapping[str, Mapping[str, type | tuple[type, ...]]]] = {
    STEP: {
        "step": int,
        "epoch": int,
        "samples": int,
        "loss": (dict, NoneType),
        "shard_losses": list,
        "shard_weights": list,
        "grad_norm": (dict, NoneType),
        "lr": list,
        "ids": str,
        "metrics": dict,
        "skipped": bool,
        "state_digest": (str, NoneType),
        "timing": dict,
    },
    EVENT: {"event": str, "step": int, "attempt": int, "time": (int, float), "fields": dict},
}
"""The fields of a line by its type, with the JSON types that each may have."""

INHERITED: Final = 0
"""The attempt of lines that a fork took over from its parent."""


def pack(value: Any) -> Any:
    """Plain data with each float in it packed; mappings and sequences are gone into."""
    if isinstance(value, float):
        return pack_float(value)
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, Mapping):
        return {str(key): pack(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [pack(item) for item in value]
    return value


def unpack(value: Any) -> Any:
    """Inverse of `pack`, up to tuples, which come back as lists."""
    if isinstance(value, dict):
        if value.keys() == {"v", "hex"}:
            return unpack_float(value)
        return {key: unpack(item) for key, item in value.items()}
    if isinstance(value, list):
        return [unpack(item) for item in value]
    return value


def malformed(data: Mapping[str, Any]) -> str:
    """What is wrong with a line of the ledger, at a quick look; empty: nothing."""
    for name, allowed in KINDS[data["type"]].items():
        if name not in data:
            return f"{name} is missing"
        if not isinstance(data[name], allowed):
            return f"{name} is {data[name]!r}"
    return "" if data["step"] >= 0 else f"step is {data['step']}"


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """What one step computed; equal on every worker, whatever their number.

    Attributes:
        step: number of the step, counted from 0 over the run.
        epoch: the epoch it belongs to.
        samples: samples that the step took, over all shards.
        loss: the step's weighted mean loss; None when no shard had weight.
        shard_losses: by shard; None for an absent one.
        shard_weights: by shard; None for an absent one.
        grad_norm: global norm of the reduced gradient before clipping; None without a gradient.
        lr: learning rate in force, one per parameter group.
        ids: digest of the sample ids by shard (`exact.digest.ids_digest`).
        metrics: the workload's own, by name.
        skipped: the update was not applied.
        state_digest: digest of the live state after the step, where one was taken.
        timing: seconds by name ("step_s", "data_wait_s"); never compared.
        attempt: the attempt that took the step; the recorder fills it in; never compared.
        time: seconds since the epoch when the recorder took it in; never compared.
    """

    step: int
    epoch: int
    samples: int
    loss: float | None
    shard_losses: Sequence[float | None]
    shard_weights: Sequence[float | None]
    grad_norm: float | None
    lr: Sequence[float]
    ids: str
    metrics: Mapping[str, float] = field(default_factory=dict)
    skipped: bool = False
    state_digest: str | None = None
    timing: Mapping[str, float] = field(default_factory=dict)
    attempt: int | None = None
    time: float | None = None

    def to_json(self) -> dict[str, Any]:
        """The record as plain JSON data."""
        data: dict[str, Any] = {
            "type": STEP,
            "step": self.step,
            "epoch": self.epoch,
            "samples": self.samples,
            "loss": pack(self.loss),
            "shard_losses": pack(list(self.shard_losses)),
            "shard_weights": pack(list(self.shard_weights)),
            "grad_norm": pack(self.grad_norm),
            "lr": pack(list(self.lr)),
            "ids": self.ids,
            "metrics": pack(dict(self.metrics)),
            "skipped": self.skipped,
            "state_digest": self.state_digest,
            "timing": dict(self.timing),
        }
        if self.attempt is not None:
            data["attempt"] = self.attempt
        if self.time is not None:
            data["time"] = self.time
        return data

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> StepRecord:
        """Inverse of `to_json`.

        Raises:
            StorageError: a field is missing or of another kind.
        """
        try:
            return cls(
                step=int(data["step"]),
                epoch=int(data["epoch"]),
                samples=int(data["samples"]),
                loss=unpack(data["loss"]),
                shard_losses=unpack(data["shard_losses"]),
                shard_weights=unpack(data["shard_weights"]),
                grad_norm=unpack(data["grad_norm"]),
                lr=unpack(data["lr"]),
                ids=data["ids"],
                metrics=unpack(data["metrics"]),
                skipped=bool(data["skipped"]),
                state_digest=data["state_digest"],
                timing=data["timing"],
                attempt=data.get("attempt"),
                time=data.get("time"),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise StorageError(
                f"a step line of the ledger is malformed ({error!r}): {str(data)[:200]}"
            ) from error


@dataclass(frozen=True, kw_only=True)
class EventRecord:
    """Something that happened to a run.

    Attributes:
        event: which of the closed list.
        step: the step it belongs to: the number of steps taken when it happened.
        attempt: the attempt it happened in; 0 before the first.
        time: seconds since the epoch, by the clock of the one who noticed.
        fields: plain data; floats in it are kept bit-exact. For `evaluation`:
            `{"metrics": {name: float}, "samples": int}`; for `message`: `{"text": str}`.
    """

    event: Event
    step: int
    attempt: int
    time: float
    fields: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """The event as plain JSON data."""
        return {
            "type": EVENT,
            "event": str(self.event),
            "step": self.step,
            "attempt": self.attempt,
            "time": self.time,
            "fields": pack(dict(self.fields)),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> EventRecord:
        """Inverse of `to_json`.

        Raises:
            StorageError: a field is missing, or the event is none of the list.
        """
        try:
            return cls(
                event=Event(data["event"]),
                step=int(data["step"]),
                attempt=int(data["attempt"]),
                time=float(data["time"]),
                fields=unpack(data["fields"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise StorageError(
                f"an event line of the ledger is malformed ({error!r}): {str(data)[:200]}"
            ) from error


def same_values(a: StepRecord, b: StepRecord, *, tolerance: float | None = None) -> list[str]:
    """Lines `quantity: value in a against value in b` where two records of a step differ.

    Timing and attempt are left out, and so is a digest of the state that only one of them has
    (how often one is taken may change). The most telling quantity stands first.

    Args:
        a: one record.
        b: the other.
        tolerance: compare floats with this relative tolerance (absolute below 1) instead of bit
            for bit, and digests of the state not at all: they say nothing about closeness.
    """
    found: list[str] = []
    for name in ("step", "epoch", "samples", "ids", "skipped"):
        left, right = getattr(a, name), getattr(b, name)
        if left != right:
            found.append(f"{name}: {left} against {right}")
    for name in ("lr", "shard_weights", "shard_losses"):
        found += _differing_lists(name, getattr(a, name), getattr(b, name), tolerance)
    for name in ("loss", "grad_norm"):
        found += _differing(name, getattr(a, name), getattr(b, name), tolerance)
    found += differing_metrics(a.metrics, b.metrics, tolerance=tolerance)
    digests = (a.state_digest, b.state_digest)
    if tolerance is None and None not in digests and digests[0] != digests[1]:
        found.append(f"state_digest: {digests[0]} against {digests[1]}")
    return found


def differing_metrics(
    a: Mapping[str, float], b: Mapping[str, float], *, tolerance: float | None = None
) -> list[str]:
    """Lines as `same_values` gives, for two sets of metrics."""
    found: list[str] = []
    for name in sorted({*a, *b}):
        found += _differing(f"metrics.{name}", a.get(name), b.get(name), tolerance)
    return found


def _differing_lists(
    name: str,
    a: Sequence[float | None],
    b: Sequence[float | None],
    tolerance: float | None,
) -> list[str]:
    if len(a) != len(b):
        return [f"{name}: {len(a)} values against {len(b)}"]
    found: list[str] = []
    for index, (left, right) in enumerate(zip(a, b, strict=True)):
        found += _differing(f"{name}[{index}]", left, right, tolerance)
    return found


def _differing(name: str, a: float | None, b: float | None, tolerance: float | None) -> list[str]:
    if a is None or b is None:
        same = a is b
    elif tolerance is None or not (math.isfinite(a) and math.isfinite(b)):
        same = canonical_float_hex(a) == canonical_float_hex(b)
    else:
        same = math.isclose(a, b, rel_tol=tolerance, abs_tol=tolerance)
    return [] if same else [f"{name}: {_show(a)} against {_show(b)}"]


def _show(value: float | None) -> str:
    return "absent" if value is None else f"{canonical_float_hex(value)} ({value:.9g})"
