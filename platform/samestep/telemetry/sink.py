"""What the recorder feeds: the seam between the ledger and whatever shows a run elsewhere.

A sink never sees anything that is not in the ledger, except the last step and the workers'
reports for display. It works
in a thread of its own (`outlet.Outlet`), may fail or hang there, and delays nobody.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from samestep.checkpoint.storage import Storage
from samestep.spec import JobSpec
from samestep.telemetry.records import StepRecord
from samestep.telemetry.reports import WorkerReport
from samestep.telemetry.spool import Line, Position


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """What a sink is told of its run.

    Attributes:
        run: the run directory.
        name: of the run.
        spec: the job.
        returning: the recorder's process died in mid-run and this one goes on: nothing may be
            refused any more, only warned of.
        about: facts that only the launcher knows, by name (see `provenance.facts`).
        say: tells whoever follows the run; from any thread.
        waiting: lines of the ledger that each sink has not taken yet, by its name; from any thread.
    """

    run: Storage
    name: str
    spec: JobSpec
    returning: bool = False
    about: Mapping[str, str] = field(default_factory=dict)
    say: Callable[[str], None] = lambda text: None
    waiting: Callable[[], Mapping[str, int]] = dict


class StartOver(Exception):
    """Raised by `Sink.take`: deliver from the beginning of the ledger on."""


class Sink(Protocol):
    """A place that a run is delivered to."""

    name: str
    """A word for thread names and messages."""
    interval_s: float
    """Least time between two deliveries."""

    def started(self, info: RunInfo) -> Position:
        """Begins, in the recorder's own thread: quick, and without waiting for anybody.

        Returns:
            Where in the ledger to go on.

        Raises:
            InputError: the run must not start like this.
        """

    def take(self, lines: Sequence[Line], *, more: bool) -> None:
        """Delivers lines, in the sink's thread; whatever it raises, it gets them again later.

        Args:
            lines: the next ones; none when it has got all there are.
            more: others follow at once.
        """

    def live(self, record: StepRecord) -> None:
        """Shows the last step, also one taken again; in the sink's thread, between takes."""

    def wants(self, report: WorkerReport) -> bool:
        """Whether a report is of use to it; from any thread, never waits."""

    def reports(self, found: Sequence[WorkerReport], num_dropped: int) -> None:
        """Shows the present workers, from samples; in the sink's thread, between takes.

        Args:
            found: the reports since the last time, of any worker, in the order they came.
            num_dropped: how many were let go since then, because the sink was busy.
        """

    def status(self) -> dict[str, Any]:
        """What the status of the run should tell of it; from any thread, never waits."""

    def explain(self, error: BaseException) -> str:
        """A sentence for people: what failed, and what becomes of what waits."""

    def wait_until_seen(self) -> bool:
        """Waits, once all is delivered, for whoever fetches it by himself; bounded.

        Returns:
            Whether it is known that nothing which somebody must see was missed.
        """

    def close(self) -> None:
        """Ends, in the sink's thread, after the last `take`."""

    def abandon(self) -> None:
        """Ends in place of `close`: the run is another recorder's, which nothing here may touch."""
