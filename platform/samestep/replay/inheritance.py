"""What a run directory takes over from another run: its steps so far, and a state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

from samestep.checkpoint.manifest import step_name
from samestep.checkpoint.reading import load_checkpoint, newest_whole
from samestep.checkpoint.storage import Storage
from samestep.engine.offers import Way, left_out_before
from samestep.names import CHECKPOINTS_DIR, MANIFEST_FILE, Event
from samestep.spec import JobSpec
from samestep.telemetry.ledger import LedgerWriter, events, steps
from samestep.telemetry.records import INHERITED

CHUNK_LINES: Final = 1000


def inherit(source: Storage, target: Storage, step: int, *, name: str) -> None:
    """Copies the lines of the first `step` steps, and of the evaluations between them.

    They bear no attempt of the new run and no times of work: they are not its own.

    Args:
        source: a run directory.
        target: one without a ledger.
        step: how many.
        name: of the new run.
    """
    writer, chunk = LedgerWriter(target, run_name=name), list[dict[str, Any]]()
    for line in _lines(source, step):
        chunk.append(line)
        if len(chunk) == CHUNK_LINES:
            writer.append(chunk)
            chunk = []
    writer.append(chunk)


def copy_checkpoint(source: Storage, target: Storage, step: int) -> str:
    """Copies the checkpoint after `step` steps, whole; returns its digest.

    Raises:
        CheckpointError: it is damaged.
    """
    _, manifest = load_checkpoint(source, step)
    folder = f"{CHECKPOINTS_DIR}/{step_name(step)}"
    for name in (*manifest.files, MANIFEST_FILE):  # the manifest makes it real
        target.write(f"{folder}/{name}", source.read(f"{folder}/{name}"))
    return manifest.digest


def newest_of_the_way(run: Storage, spec: JobSpec, at_most_step: int) -> int | None:
    """The newest whole checkpoint that is no remains of steps which were taken back.

    Args:
        run: the run directory.
        spec: its job, with all that the run leaves out.
        at_most_step: no newer one.
    """
    way = Way(spec.incidents.leave_out, ())
    found, _ = newest_whole(run, at_most_step)
    while found is not None and not way.fits(found.step, left_out_before(found.state)):
        found, _ = newest_whole(run, found.step - 1)
    return None if found is None else found.step


def _lines(run: Storage, step: int) -> Iterator[dict[str, Any]]:
    evaluated = {
        event.step: replace(event, attempt=INHERITED).to_json()
        for event in events(run, Event.EVALUATION)
        if event.step <= step
    }
    for number, record in steps(run).items():
        if number >= step:
            return
        yield replace(record, attempt=INHERITED, timing={}).to_json()
        if number + 1 in evaluated:
            yield evaluated[number + 1]
