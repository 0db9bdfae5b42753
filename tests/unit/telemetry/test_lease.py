from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from samestep.checkpoint.storage import Storage
from samestep.errors import RunInUseError, StorageError
from samestep.telemetry.lease import STALE_S, Holder, Lease, acquire, holder

NEVER_S = 3600.0


class Clock:
    """Time that passes only when somebody sleeps; `on_sleep` lets the world go on meanwhile."""

    def __init__(self) -> None:
        self.now_s = 1000.0
        self.on_sleep: Callable[[], None] = lambda: None

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.on_sleep()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def take(run: Storage, clock: Clock) -> Iterator[Callable[..., Lease]]:
    """Takes the lease of `run` on the test's clock, and gives all of them back at the end."""
    taken: list[Lease] = []

    def acquire_one(**options: object) -> Lease:
        settings: dict[str, object] = {"renew_s": NEVER_S, **options}
        lease = acquire(run, monotonic=clock, sleep=clock.sleep, **settings)  # type: ignore[arg-type]
        taken.append(lease)
        return lease

    yield acquire_one
    for lease in taken:
        lease.release()


def lease_file(run: Storage) -> Path:
    assert run.local_path is not None
    (path,) = run.local_path.glob("lease-*.json")
    return path


def rewrite(run: Storage, **changes: object) -> None:
    path = lease_file(run)
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_nobody_holds_a_run_that_was_never_started(run: Storage) -> None:
    assert holder(run) is None


def test_the_holder_is_this_living_process(run: Storage, take: Callable[..., Lease]) -> None:
    lease = take()
    present = holder(run)
    assert present is not None
    assert present.alive
    assert present.owner == lease.owner
    assert lease.held()


def test_a_released_lease_is_taken_at_once(
    run: Storage, clock: Clock, take: Callable[..., Lease]
) -> None:
    take().release()
    present = holder(run)
    assert present is not None
    assert not present.alive
    started_s = clock.now_s
    assert take().held()
    assert clock.now_s == started_s


def test_a_holder_that_renews_is_left_alone(clock: Clock, take: Callable[..., Lease]) -> None:
    lease = take()
    clock.on_sleep = lease.renew
    with pytest.raises(RunInUseError, match=r"in use by process \d+ on .* renewing"):
        take()
    assert lease.held()


def test_thirty_unchanged_seconds_make_a_lease_free(
    run: Storage, clock: Clock, take: Callable[..., Lease]
) -> None:
    first = take()
    rewrite(run, machine="elsewhere")
    started_s = clock.now_s
    second = take()
    assert clock.now_s - started_s == pytest.approx(STALE_S, abs=1)
    assert second.held()
    assert not first.held()


def test_a_wanter_that_may_not_wait_so_long_is_told_who_holds_it(
    run: Storage, clock: Clock, take: Callable[..., Lease]
) -> None:
    take()
    rewrite(run, machine="elsewhere", host="node-7")
    with pytest.raises(RunInUseError, match=r"node-7 .*nothing changed in 5 s"):
        take(wait_s=5)


def test_one_that_was_taken_from_learns_it_and_tells(
    run: Storage, clock: Clock, take: Callable[..., Lease]
) -> None:
    told: list[Holder | None] = []
    first = take(on_lost=told.append)
    rewrite(run, machine="elsewhere")
    second = take()
    first.renew()
    assert first.lost
    assert [taker.owner for taker in told if taker] == [second.owner]
    first.renew()
    first.release()
    assert len(told) == 1
    assert second.held()


def test_a_process_that_slept_looks_before_it_says_that_it_holds(
    run: Storage, clock: Clock, take: Callable[..., Lease]
) -> None:
    first = take()
    rewrite(run, machine="elsewhere")
    take()
    assert not first.lost
    clock.now_s += STALE_S
    assert not first.held()


def test_one_that_was_taken_from_stays_out_when_the_taker_is_done(
    run: Storage, take: Callable[..., Lease]
) -> None:
    first = take()
    rewrite(run, machine="elsewhere")
    take().release()
    first.renew()
    assert first.lost


def test_of_many_that_want_a_free_lease_one_gets_it(run: Storage) -> None:
    leases: list[Lease] = []
    refused: list[RunInUseError] = []
    gate = threading.Barrier(6)

    def want() -> None:
        gate.wait(10)
        try:
            leases.append(acquire(run, wait_s=0))
        except RunInUseError as error:
            refused.append(error)

    threads = [threading.Thread(target=want) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    try:
        assert (len(leases), len(refused)) == (1, 5)
    finally:
        for lease in leases:
            lease.release()


HOLD = """
import sys
from samestep.checkpoint.storage import Storage
from samestep.telemetry.lease import acquire
acquire(Storage.at(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def test_a_killed_holder_on_this_machine_is_replaced_at_once(
    run: Storage, clock: Clock, take: Callable[..., Lease]
) -> None:
    package = Path(__file__).parents[3] / "platform"
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, run.uri],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=package,
    )
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"held\n"
        present = holder(run)
        assert present is not None
        assert present.pid == child.pid
        assert present.alive
        with pytest.raises(RunInUseError):
            take(wait_s=1)
        child.kill()
        child.wait(10)
        assert not present.alive
        started_s = clock.now_s
        assert take().held()
        assert clock.now_s == started_s
    finally:
        child.kill()
        child.communicate()


def test_another_process_with_the_same_number_is_not_the_holder(
    run: Storage, take: Callable[..., Lease]
) -> None:
    take()
    rewrite(run, started="12345")
    present = holder(run)
    assert present is not None
    assert not present.alive


def test_the_lease_is_renewed_while_it_is_held(run: Storage) -> None:
    lease = acquire(run, renew_s=0.01)
    try:
        waited = threading.Event()
        for _ in range(1000):
            present = holder(run)
            assert present is not None
            if present.counter >= 3:
                break
            waited.wait(0.01)
        assert present.counter >= 3
    finally:
        lease.release()


def test_storage_that_fails_for_a_while_does_not_lose_the_lease(run: Storage) -> None:
    lease = acquire(run, renew_s=0.01)
    waited = threading.Event()
    try:
        path = lease_file(run)
        content = path.read_bytes()
        path.write_bytes(b"not json")
        waited.wait(0.1)
        path.write_bytes(content)
        for _ in range(1000):
            present = holder(run)
            assert present is not None
            if present.counter > json.loads(content)["counter"]:
                break
            waited.wait(0.01)
        assert lease.held()
    finally:
        lease.release()


def test_a_damaged_lease_says_what_to_do(run: Storage, take: Callable[..., Lease]) -> None:
    lease = take()
    path = lease_file(run)
    content = path.read_bytes()
    path.write_bytes(b"{")
    with pytest.raises(StorageError, match="delete it if no process is training"):
        holder(run)
    path.write_bytes(content)
    assert lease.held()
