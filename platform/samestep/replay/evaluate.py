"""Evaluating a checkpoint again: in one process, and against what the ledger says of that step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from samestep.checkpoint.reading import load_checkpoint
from samestep.checkpoint.state import restore
from samestep.checkpoint.storage import Storage
from samestep.engine.peers import Peers
from samestep.engine.setup import build
from samestep.errors import WorkloadError
from samestep.exact import numerics
from samestep.exact.seeds import global_generators_kept
from samestep.names import Event
from samestep.replay.device import device_of
from samestep.telemetry.identity import read_spec
from samestep.telemetry.ledger import events
from samestep.telemetry.records import differing_metrics
from samestep.workload import load_workload

ADVICE = "evaluate on a machine with one"


class Agreement(StrEnum):
    """How an evaluation stands to the ledger's of the same step."""

    EQUAL = "equal"
    WITHIN_TOLERANCE = "within_tolerance"
    DIFFERENT = "different"
    NOT_IN_LEDGER = "not_in_ledger"


@dataclass(frozen=True, kw_only=True)
class Evaluated:
    """What came out of evaluating a checkpoint.

    Attributes:
        step: steps taken before the checkpoint.
        metrics: by name, over all evaluation samples.
        num_samples: size of the evaluation data.
        digest: of the checkpoint.
        agreement: with the ledger.
        differences: lines `metrics.name: in the ledger against now`, bit for bit.
        numerics: lines telling how the numerics differ from those of the checkpoint.
        tolerance: what the metrics were held to where numerics differ, else None.
    """

    step: int
    metrics: dict[str, float]
    num_samples: int
    digest: str
    agreement: Agreement
    differences: tuple[str, ...]
    numerics: tuple[str, ...]
    tolerance: float | None


def search_folders(run: Storage) -> list[Path]:
    """Where the run's last attempt found its workload, as far as that is still there."""
    started = events(run, Event.ATTEMPT_STARTED)
    told = started[-1].fields.get("search", []) if started else []
    return [Path(folder) for folder in told if Path(folder).is_dir()]


def evaluate_checkpoint(run: Storage, step: int, *, search: Sequence[Path]) -> Evaluated:
    """Builds the workload, restores a checkpoint into it, and evaluates it in this process.

    Settings of torch and the random generators are put back afterwards.

    Args:
        run: the run directory.
        step: of the checkpoint.
        search: folders in which the workload's module is looked for.

    Raises:
        CheckpointError: the checkpoint is damaged, or does not fit the workload.
        WorkloadError: the workload can't be loaded, or has no evaluation.
        UserCodeError: the workload raised.
    """
    spec = read_spec(run)
    device = device_of(spec, advice=ADVICE)
    state, manifest = load_checkpoint(run, step)
    with numerics.GlobalsKept(), global_generators_kept():
        numerics.pin(spec)
        built = build(spec, load_workload(spec.workload, spec.args, list(search)), device)
        fingerprint = numerics.fingerprint(spec, device.type, built.parts.dtypes)
        if built.evaluation is None:
            raise WorkloadError(
                f"workload {spec.workload!r} has no evaluation: its evaluation_data() returns None"
            )
        restore(state, built.parts)
        metrics = built.evaluation.run(built.parts.model, Peers(None), step=step, device=device)
    apart = numerics.differences(manifest.meta.numerics, fingerprint)
    tolerance = numerics.tolerance(spec.precision, fingerprint) if apart else None
    agreement, found = _against_ledger(run, step, metrics, tolerance)
    return Evaluated(
        step=step,
        metrics=metrics,
        num_samples=built.evaluation.size,
        digest=manifest.digest,
        agreement=agreement,
        differences=tuple(found),
        numerics=tuple(apart),
        tolerance=tolerance,
    )


def _against_ledger(
    run: Storage, step: int, metrics: dict[str, float], tolerance: float | None
) -> tuple[Agreement, list[str]]:
    recorded = [event.fields for event in events(run, Event.EVALUATION) if event.step == step]
    if not recorded:
        return Agreement.NOT_IN_LEDGER, []
    before = recorded[-1]["metrics"]
    found = differing_metrics(before, metrics)
    if not found:
        return Agreement.EQUAL, []
    if tolerance is not None and not differing_metrics(before, metrics, tolerance=tolerance):
        return Agreement.WITHIN_TOLERANCE, found
    return Agreement.DIFFERENT, found
