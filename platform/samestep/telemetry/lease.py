"""The lease of a run: at most one live recorder writes into a run directory.

Files `lease-00000001.json`, `lease-00000002.json`, ...: the highest number is the lease, and
whoever takes it over creates the next number exclusively, so that two who want it can't both win
and one that was taken from can't take part again. (On storage without conditional create this is
best effort, and said so.) The holder rewrites its file every few seconds with a counter that goes
up. No clocks of two machines are ever compared: who wants the lease waits until it has stayed
unchanged for `STALE_S` of its own time, or sees at once that the holder, a process of this same
machine, is dead. The highest file is never deleted, only marked as released.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import psutil  # type: ignore[import-untyped]

from samestep.checkpoint.storage import Storage
from samestep.errors import RunInUseError, StorageError
from samestep.names import LEASE_PREFIX, LEASE_SUFFIX, THREAD_LEASE
from samestep.telemetry.provenance import job_id

FORMAT: Final = 1
RENEW_S: Final = 5.0
STALE_S: Final = 30.0
POLL_S: Final = 0.5

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Holder:
    """Who holds, or held, a lease.

    Attributes:
        owner: a random name of this taking of the lease.
        host: name of the machine.
        machine: tells this boot and this space of process ids from all others.
        pid: process id on that machine.
        started: when the process started, in the machine's own ticks: a pid may be reused.
        counter: goes up with each renewal.
        released: given back in good order.
        job_id: the Ray job that the process belongs to, where there is one.
    """

    owner: str
    host: str
    machine: str
    pid: int
    started: str
    counter: int = 0
    released: bool = False
    job_id: str | None = None

    @property
    def alive(self) -> bool:
        """False when released or known to be dead; a process of another machine counts as alive.

        Only waiting can tell whether a process elsewhere is still there (`acquire` does).
        """
        if self.released:
            return False
        if not self.is_local:
            return True
        return _process_start(self.pid) == self.started

    @property
    def is_local(self) -> bool:
        """Whether it is a process of this machine, so that `alive` is certain."""
        return self.machine == _machine()

    @property
    def where(self) -> str:
        """For messages: the process and its host."""
        job = f", Ray job {self.job_id}" if self.job_id else ""
        return f"process {self.pid} on {self.host}{job}"


class Lease:
    """A lease that this process holds; renewed by a thread until `release`, or until it is lost.

    Made by `acquire`. `on_lost` is called once, from the thread that noticed.
    """

    def __init__(
        self,
        run: Storage,
        number: int,
        me: Holder,
        *,
        on_lost: Callable[[Holder | None], None] | None = None,
        monotonic: Callable[[], float] = time.monotonic,
        renew_s: float = RENEW_S,
    ) -> None:
        self._run = run
        self._number = number
        self._me = me
        self._on_lost = on_lost
        self._monotonic = monotonic
        self._renew_s = renew_s
        self._lock = threading.RLock()
        self._renewed_at = monotonic()
        self._lost = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._keep, name=THREAD_LEASE, daemon=True)
        self._thread.start()

    @property
    def owner(self) -> str:
        """The random name under which it is held."""
        return self._me.owner

    @property
    def lost(self) -> bool:
        """Whether somebody else took it over."""
        return self._lost

    def held(self) -> bool:
        """Whether it is still ours; looks at storage when the last renewal was long ago.

        Call it before a write that only the holder may make: a process that was suspended then
        finds out before it writes, not at its thread's next turn.
        """
        with self._lock:
            if self._monotonic() - self._renewed_at > STALE_S / 2:
                self.renew()
            return not self._lost and not self._me.released

    def renew(self) -> None:
        """Writes the next count, or notes that the lease is lost.

        Raises:
            StorageError: storage can't be reached; the lease may still be ours.
        """
        with self._lock:
            if self._lost or self._me.released:
                return
            taker = _newest(self._run)
            if taker is None or taker[1].owner != self._me.owner:
                self._lose(taker[1] if taker else None)
                return
            self._me = replace(self._me, counter=self._me.counter + 1)
            self._run.write(_name(self._number), _encode(self._me))
            self._renewed_at = self._monotonic()

    def release(self) -> None:
        """Gives it back, so that the next one need not wait; does nothing when it is lost."""
        self._stop.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=STALE_S)
        with self._lock:
            if self._lost or self._me.released:
                return
            newest = _newest(self._run)
            self._me = replace(self._me, released=True, counter=self._me.counter + 1)
            if newest is not None and newest[1].owner == self._me.owner:
                self._run.write(_name(self._number), _encode(self._me))

    def _lose(self, taker: Holder | None) -> None:
        self._lost = True
        self._stop.set()
        by = f"taken over by {taker.where}" if taker else "its file is gone"
        logger.error("the lease of %s is lost: %s; nothing more is written", self._run.uri, by)
        if self._on_lost is not None:
            self._on_lost(taker)

    def _keep(self) -> None:
        failing = False
        while not self._stop.wait(self._renew_s):
            try:
                self.renew()
                failing = False
            except StorageError as error:
                if not failing:
                    logger.warning("can't renew the lease, trying on: %s", error)
                failing = True


def holder(run: Storage) -> Holder | None:
    """Who holds the lease of a run, or held it last; None where there never was one.

    Raises:
        StorageError: its file is damaged or of another format.
    """
    newest = _newest(run)
    return newest[1] if newest else None


def acquire(
    run: Storage,
    *,
    wait_s: float = STALE_S + 2 * RENEW_S,
    on_lost: Callable[[Holder | None], None] | None = None,
    monotonic: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    renew_s: float = RENEW_S,
) -> Lease:
    """Takes the lease of a run.

    Args:
        run: the run directory; made if need be.
        wait_s: how long to watch a holder that may be dead; under `STALE_S` only one that is
            known to be dead is replaced.
        on_lost: told who took it when the lease is lost later.
        monotonic: clock in seconds.
        sleep: waits that many seconds.
        renew_s: seconds between renewals.

    Raises:
        RunInUseError: a live process holds it: it renewed while we watched, or `wait_s` is over.
    """
    if run.exclusive_is_best_effort:
        logger.warning(
            "%s can't create files conditionally: two submits of this run within a second of "
            "each other might both start",
            run.uri,
        )
    started_at = changed_at = monotonic()
    seen: Holder | None = None
    while True:
        newest = _newest(run)
        number, present = newest if newest else (0, None)
        if present != seen:
            if seen is not None and present is not None and present.alive:
                raise RunInUseError(_in_use(run, present, "it is renewing its lease"))
            seen, changed_at = present, monotonic()
        unchanged_s = monotonic() - changed_at
        if present is None or not present.alive or unchanged_s >= STALE_S:
            lease = _take(run, number + 1, on_lost, monotonic, renew_s)
            if lease is not None:
                return lease
            continue
        if monotonic() - started_at >= wait_s:
            raise RunInUseError(_in_use(run, present, f"nothing changed in {wait_s:g} s"))
        sleep(POLL_S)


def _take(
    run: Storage,
    number: int,
    on_lost: Callable[[Holder | None], None] | None,
    monotonic: Callable[[], float],
    renew_s: float,
) -> Lease | None:
    me = Holder(
        owner=uuid.uuid4().hex,
        host=socket.gethostname(),
        machine=_machine(),
        pid=os.getpid(),
        started=_process_start(os.getpid()),
        job_id=job_id(),
    )
    if not run.create_exclusive(_name(number), _encode(me)):
        return None
    newest = _newest(run)
    if newest is None or newest[1].owner != me.owner:
        return None
    for old in _numbers(run):
        if old < number:
            run.delete(_name(old))
    return Lease(run, number, me, on_lost=on_lost, monotonic=monotonic, renew_s=renew_s)


def _in_use(run: Storage, present: Holder, why: str) -> str:
    return (
        f"the run {run.uri} is in use by {present.where} ({why}); wait for it, stop it, or give "
        "this run another name (--name)"
    )


def _newest(run: Storage) -> tuple[int, Holder] | None:
    for number in reversed(_numbers(run)):
        try:
            return number, _decode(run, number)
        except StorageError:
            # Deleted between listing and reading: then somebody holds a higher one.
            if number in _numbers(run):
                raise
    return None


def _numbers(run: Storage) -> list[int]:
    return sorted(
        int(stem)
        for name in run.list()
        if name.startswith(LEASE_PREFIX)
        and name.endswith(LEASE_SUFFIX)
        and (stem := name.removeprefix(LEASE_PREFIX).removesuffix(LEASE_SUFFIX)).isdigit()
    )


def _name(number: int) -> str:
    return f"{LEASE_PREFIX}{number:08d}{LEASE_SUFFIX}"


def _encode(me: Holder) -> bytes:
    return json.dumps({"format": FORMAT, **asdict(me)}, indent=1).encode()


def _decode(run: Storage, number: int) -> Holder:
    path = f"{run.uri}/{_name(number)}"
    try:
        data: dict[str, Any] = json.loads(run.read(_name(number)))
        version = data.pop("format")
        if version != FORMAT:
            raise StorageError(
                f"{path} has lease format {version!r}; this samestep reads format {FORMAT}"
            )
        return Holder(**data)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StorageError(
            f"{path} is damaged ({error!r}); delete it if no process is training this run"
        ) from error


def _machine() -> str:
    """Names this boot of this machine and this process namespace (containers share a boot)."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:  # not Linux
        boot, namespace = f"{psutil.boot_time():.0f}", ""
    return f"{socket.gethostname()} {boot} {namespace}"


def _process_start(pid: int) -> str:
    """When a process started, as text to compare; empty when there is no such process.

    Linux counts it in ticks since boot, which unlike a time of day never shifts.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        fields = stat.rpartition(")")[2].split()
        return "" if fields[0] in ("Z", "X") else fields[19]
    except OSError:
        pass
    if Path("/proc/self/stat").exists():
        return ""
    try:
        return f"{psutil.Process(pid).create_time():.2f}"
    except psutil.Error:
        return ""
