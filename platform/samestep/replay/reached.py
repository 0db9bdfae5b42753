"""The state after any step of a run, reached again by taking steps in a scratch run.

The steps are taken by the same loop that trains, in this process and without a group: so the state
is whole, with everything that a checkpoint holds. They are compared with the run's ledger.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from samestep.checkpoint.committed import list_checkpoints
from samestep.checkpoint.storage import Storage
from samestep.engine.attempt import Place, run_attempt, verdict_outcome
from samestep.engine.flag import Flag
from samestep.engine.peers import Peers
from samestep.errors import CheckpointError, DivergenceError, InputError
from samestep.exact import numerics
from samestep.exact.seeds import global_generators_kept
from samestep.replay.device import device_of
from samestep.replay.inheritance import copy_checkpoint, inherit, newest_of_the_way
from samestep.scratch import scratch_folder
from samestep.spec import JobSpec, Mode, changed_spec, dump_spec
from samestep.telemetry.identity import read_numerics
from samestep.telemetry.ledger import steps
from samestep.telemetry.link import InProcess
from samestep.telemetry.recorder import Recorder
from samestep.telemetry.records import same_values

KEEP = 10**6
"""Checkpoints: no retention in a scratch run, which takes few."""

ADVICE = "choose a step that has a checkpoint (samestep checkpoints RUN), or use a machine with one"


@dataclass(frozen=True, kw_only=True)
class Reached:
    """A state that lies in a run directory's checkpoint.

    Attributes:
        place: that run directory.
        num_taken: steps taken again to get there.
        numerics: lines telling how the numerics differ from the run's; then the steps were equal
            within the tolerance, if any were taken.
    """

    place: Storage
    num_taken: int
    numerics: tuple[str, ...] = ()


@contextmanager
def reached(run: Storage, spec: JobSpec, step: int, *, search: Sequence[Path]) -> Iterator[Reached]:
    """A run directory with a checkpoint after `step` steps: the run's own, or a scratch one.

    Settings of torch and the random generators are put back afterwards.

    Args:
        run: the run directory.
        spec: its job, with all that the run leaves out.
        step: steps taken before the state; at least 1.
        search: folders in which the workload's module is looked for.

    Raises:
        InputError: it can't be reached here.
        DivergenceError: the steps taken again were not those of the ledger.
    """
    start = newest_of_the_way(run, spec, step)
    if start == step:
        yield Reached(place=run, num_taken=0)
        return
    if spec.reduction == "fast":
        whole = [info.step for info in list_checkpoints(run) if info.whole]
        raise InputError(
            f"{run.uri} has no checkpoint after {step} steps, and with reduction: fast none can be "
            f"reached again bit for bit; take one of {', '.join(map(str, whole)) or 'another run'}"
        )
    with scratch_folder("run") as folder:
        scratch = Storage.at(str(folder))
        inherit(run, scratch, start or 0, name="scratch")
        if start is not None:
            copy_checkpoint(run, scratch, start)
        with numerics.GlobalsKept(), global_generators_kept():
            _train(scratch, _scratch_spec(spec), step, search)
        apart = _compare(run, scratch, spec, range(start or 0, step))
        yield Reached(place=scratch, num_taken=step - (start or 0), numerics=apart)


def _scratch_spec(spec: JobSpec) -> JobSpec:
    never = {"every_steps": 0, "every_seconds": 0, "snapshot_every": 0, "keep": KEEP}
    changes = {f"checkpoint.{name}": value for name, value in never.items()}
    return changed_spec(spec, {"mode": Mode.LOCAL.value, **changes})


def _train(scratch: Storage, spec: JobSpec, step: int, search: Sequence[Path]) -> None:
    """Trains until `step` steps are taken, and saves."""
    here = [0]

    def on_step(next_step: int, attempt: int, left: int) -> None:
        here[0] = next_step

    recorder = Recorder(scratch.uri, run="scratch", spec_yaml=dump_spec(spec))
    target = InProcess(recorder)
    try:
        run_attempt(
            spec,
            Place(
                mode="local",
                devices=[device_of(spec, advice=ADVICE)],
                peers=Peers(None),
                group=None,
                search=list(search),
                run_uri=scratch.uri,
                target=target,
                wants=lambda: int(Flag.STOP if here[0] == step - 1 else Flag.GO_ON),
                on_step=on_step,
            ),
        )
        result = target.call("result")
        if result is None:
            attempt = target.call("status")["attempt"]
            _, message = verdict_outcome(target.call("verdict", attempt)) or (1, "it ended early")
            raise InputError(f"step {step} can't be reached again here: {message}")
        if result["step"] != step:
            raise CheckpointError(
                f"step {step} was not reached again: training ended after {result['step']} steps"
            )
    finally:
        recorder.close()


def _compare(run: Storage, scratch: Storage, spec: JobSpec, taken: range) -> tuple[str, ...]:
    then, now = read_numerics(run) or {}, read_numerics(scratch) or {}
    apart = numerics.differences(then, now)
    tolerance = numerics.tolerance(spec.precision, then, now) if apart else None
    before, again = steps(run, taken.start), steps(scratch, taken.start)
    for step in taken:
        found = same_values(before[step], again[step], tolerance=tolerance)
        if found:
            raise DivergenceError(
                f"step {step} taken again differs from the ledger of {run.uri}: {found[0]}; the "
                "workload's code or its data is not what it was"
                + (f", or it is because of the numerics ({'; '.join(apart)})" if apart else "")
            )
    return tuple(apart)
