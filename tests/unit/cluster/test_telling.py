"""How long the errors of those who lost somebody wait for that of the one who met the cause."""

from __future__ import annotations

from samestep.cluster.process import Process
from samestep.cluster.ray_private_control import (
    ECHO_S,
    TELLING_S,
    WorkerGroupPollStatus,
    patience_s,
)
from samestep.cluster.ray_private_worker import SteadyStatus
from samestep.errors import AttemptFailedError

ECHO = AttemptFailedError("lost worker 0", {"is_echo": True})
OWN = AttemptFailedError("ValueError: mine", {"is_echo": False})


def status(
    *errors: AttemptFailedError | None, telling: Process | None = None
) -> WorkerGroupPollStatus:
    """Of workers of which those without an error still run; the first tells what it will."""
    states = {}
    for rank, error in enumerate(errors):
        states[rank] = SteadyStatus(running=error is None, error=error)
    if telling is not None:
        states[0].whereabouts = telling.whereabouts()
    return WorkerGroupPollStatus(worker_statuses=states)


def test_a_worker_that_writes_down_what_happened_is_waited_for() -> None:
    process = Process()
    assert patience_s(status(None, ECHO, telling=process)) == ECHO_S
    process.note_telling()
    assert patience_s(status(None, ECHO, telling=process)) == TELLING_S
    assert TELLING_S > 10 * ECHO_S
    process.start()  # of the next attempt it has told nothing
    assert patience_s(status(None, ECHO, telling=process)) == ECHO_S


def test_nobody_is_waited_for_once_the_cause_is_told_or_where_nothing_failed() -> None:
    process = Process()
    process.note_telling()
    assert patience_s(status(OWN, ECHO, telling=process)) == 0
    assert patience_s(status(None, None, telling=process)) == 0
    assert patience_s(status(ECHO, ECHO)) == 0  # there is nobody left who could tell more
