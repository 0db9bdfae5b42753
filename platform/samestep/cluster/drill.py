"""A drill: a job once undisturbed, then under faults, and whether the weights are the same.

The driver of each run is a process of its own, as a user's would be; the nodes are several raylets
on this machine, or a cluster that is given. Strikes are triggered by what the run's ledger says.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Final

from samestep.checkpoint.storage import Storage
from samestep.cluster.drilled import Blow, RoundResult, Watched, missed, told
from samestep.cluster.environment import prepare_ray
from samestep.cluster.ground import Ground, Member, own_nodes
from samestep.cluster.strikes import Fault, Strike, random_strikes, refuse_of_nodes
from samestep.errors import ExitStatus, InputError, SamestepError
from samestep.names import Env, RunState
from samestep.spec import JobSpec, dump_spec
from samestep.spec_training import below
from samestep.telemetry import lease as leases
from samestep.telemetry.identity import read_result
from samestep.telemetry.spool import Spool

POLL_S: Final = 0.02
REMOTE_POLL_S: Final = 0.5
"""Between two looks at a ledger in an object store."""
RUN_TIMEOUT_S: Final = 3600.0
HANG_TIMEOUT_S: Final = 10.0
MAX_STARTS: Final = 20
OUTPUT_SHOWN: Final = 4000
MAX_LINES: Final = 1000

Say = Callable[[str], None]


class Drill:
    """Runs a job with and without faults.

    Args:
        spec: the job; how many workers, and telemetry, are set by the drill.
        job_folder: where its workload is looked for.
        folder: for output, and for runs on nodes of this machine; must exist.
        num_nodes: nodes of one slot each, which the drill starts on this machine.
        address: of a cluster that is used instead; its nodes are left alone, and runs lie in a
            folder of the job's own storage, which all nodes share.
        say: told what happens.

    Raises:
        InputError: the job needs more workers than there are nodes.
    """

    def __init__(
        self,
        spec: JobSpec,
        *,
        job_folder: Path,
        folder: Path,
        num_nodes: int,
        address: str | None = None,
        say: Say,
    ) -> None:
        if address is None and spec.workers.min > num_nodes:
            raise InputError(
                f"the job needs at least {spec.workers.min} workers, the drill has {num_nodes} "
                "nodes of one slot: give it more with --nodes"
            )
        self._job = folder / "job.yaml"
        self._job_folder = job_folder
        self._folder = folder
        self._num_nodes = num_nodes if address is None else None
        self._address = address
        self.say = say
        self._spec = _for_drill(spec, self._storage(spec), self._num_nodes)
        self._job.write_text(dump_spec(self._spec), encoding="utf-8")

    def run(self, rounds: Sequence[Sequence[Strike]] | tuple[int, int]) -> list[RoundResult]:
        """The undisturbed run first, then one run per round.

        Args:
            rounds: the strikes of each; or (seed, number of rounds) for random ones.

        Raises:
            InputError: a fault is not possible here, or the cluster can't be reached.
        """
        with self._ground(rounds) as ground:
            calm = _Round(self, ground, "calm", ()).run("")
            self.say(told(calm))
            results = [calm]
            if calm.status != RunState.DONE:
                return results
            for number, strikes in enumerate(self._strikes(rounds, calm.steps)):
                ground.restore()
                result = _Round(self, ground, f"round-{number}", strikes).run(calm.digest)
                self.say(told(result))
                results.append(result)
        return results

    def start_driver(self, name: str, output: Path, address: str) -> subprocess.Popen[bytes]:
        """Starts `samestep train` on the drill's cluster."""
        with output.open("ab") as log:
            return subprocess.Popen(
                [
                    *(sys.executable, "-m", "samestep", "train", str(self._job), "--name", name),
                    *("--workers", f"{self._spec.workers.min}:{self._spec.workers.max}"),
                ],
                cwd=self._job_folder,
                env={**os.environ, str(Env.RAY_ADDRESS): address},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def run_of(self, name: str) -> Storage:
        """The run directory of one of its runs."""
        return Storage.at(below(self._spec.storage, name))

    def output_of(self, name: str) -> Path:
        """Where what the drivers of a run print is kept."""
        return self._folder / f"{name}.log"

    def _storage(self, spec: JobSpec) -> str:
        if self._address is None:
            return str(self._folder / "runs")
        shared = spec.storage if "://" in spec.storage else str(Path(spec.storage).resolve())
        storage = below(shared, f"drill-{uuid.uuid4().hex[:8]}")
        self.say(f"the drill's runs lie in {storage}, which all nodes must share; they are kept")
        return storage

    def _ground(
        self, rounds: Sequence[Sequence[Strike]] | tuple[int, int]
    ) -> AbstractContextManager[Ground]:
        match rounds:
            case (int(), int()):
                strikes: list[Strike] = []  # drawn of those that are possible
            case _:
                strikes = [strike for each in rounds for strike in each]
        if self._num_nodes is not None:
            linked = any(strike.fault is Fault.CUT_NODE for strike in strikes)
            return own_nodes(self._num_nodes, linked=linked)
        refuse_of_nodes(strikes)
        prepare_ray(starts=False)
        from samestep.cluster.given import given_cluster

        assert self._address is not None
        return given_cluster(self._address)

    def _strikes(
        self, rounds: Sequence[Sequence[Strike]] | tuple[int, int], num_steps: int
    ) -> list[list[Strike]]:
        match rounds:
            case (int(seed), int(number)):
                return [
                    random_strikes(seed, n, num_steps=num_steps, num_nodes=self._num_nodes)
                    for n in range(number)
                ]
            case _:
                return [list(strikes) for strikes in rounds]


class _Round:
    """One run, from its first driver to its end."""

    def __init__(self, drill: Drill, ground: Ground, name: str, strikes: Sequence[Strike]) -> None:
        self._drill = drill
        self._ground = ground
        self._lost: list[Member] = []
        self._name = name
        self._due = list(strikes)
        self._struck: list[Blow] = []
        self._watched = Watched()
        self._num_seen = 0
        self._run = drill.run_of(name)
        self._spool = Spool(self._run)
        self._output = drill.output_of(name)
        self._driver: subprocess.Popen[bytes] | None = None

    def run(self, calm_digest: str) -> RoundResult:
        started = time.monotonic()
        message = ""
        try:
            self._drive(started + RUN_TIMEOUT_S)
        except (SamestepError, TimeoutError) as error:
            message = str(error)
        finally:
            if self._driver is not None and self._driver.poll() is None:
                self._driver.kill()
                self._driver.wait()
            # Whoever was stopped for good could not be ended otherwise.
            self._ground.signal(self._ground.living(self._lost), signal.SIGKILL)
        self._watch()
        for blow in missed(self._due, at_step=self._watched.num_steps, at_s=time.time()):
            self._drill.say(f"{self._name}: {blow.strike.fault} {blow.note}")
            self._struck.append(blow)
        result = read_result(self._run) or {}
        digest = str(result.get("digest", ""))
        return RoundResult(
            name=self._name,
            status=str(result.get("status", "no result")),
            digest=digest,
            same=bool(digest) and digest == (calm_digest or digest),
            steps=self._watched.num_steps,
            redone=self._watched.redone,
            attempts=len(self._watched.attempts),
            wall_s=time.monotonic() - started,
            struck=tuple(self._watched.costs(self._struck)),
            message=message or str(result.get("message", "")),
        )

    def _drive(self, deadline: float) -> None:
        pause = threading.Event()
        for _ in range(MAX_STARTS):
            self._driver = self._drill.start_driver(self._name, self._output, self._ground.address)
            num_struck = len(self._struck)
            while self._driver.poll() is None:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"not done within {RUN_TIMEOUT_S:g} s")
                self._watch()
                self._get_ready()
                self._strike_what_is_due()
                pause.wait(POLL_S if self._run.is_local else REMOTE_POLL_S)
            self._watch()
            status = self._driver.returncode
            if status == ExitStatus.DONE:
                return
            stopped = any(blow.strike.fault in _ENDS_DRIVER for blow in self._struck[num_struck:])
            if not stopped:
                raise InputError(
                    f"the driver ended with {status}:\n{self._output_end()}\n(all of it: "
                    f"{self._output})"
                )
        raise InputError(f"the driver was started {MAX_STARTS} times, and the run is not done")

    def _output_end(self) -> str:
        return self._output.read_text(errors="replace")[-OUTPUT_SHOWN:]

    def _watch(self) -> None:
        while lines := self._spool.read(MAX_LINES):
            self._spool.seek(lines[-1].position)
            for line in lines:
                self._watched.take(line.record)

    def _get_ready(self) -> None:
        """Looks at who is to be struck: what strikes on a node may take seconds to start there."""
        if self._num_seen < len(self._watched.attempts):
            self._num_seen = len(self._watched.attempts)
            with suppress(InputError):  # a strike that can't be made is told when it is due
                self._workers()
                self._recorder()

    def _strike_what_is_due(self) -> None:
        while self._due and self._watched.num_steps >= self._due[0].step:
            strike = self._due[0]
            if strike.fault in _NEEDS_WORKERS and not self._workers():
                return  # between two groups: it strikes the next one
            self._due.pop(0)
            at_s = time.time()
            holders = self._holders()
            note, missed = self._strike(strike)
            if strike.fault not in _PLANNED:
                holders = [] if strike.fault is Fault.KILL_DRIVER else self._holders()
            self._drill.say(
                f"{self._name}: {strike.fault} at step {self._watched.num_steps}"
                + (f" ({note})" if note else "")
            )
            blow = Blow(
                strike=strike,
                at_step=self._watched.num_steps,
                at_s=at_s,
                note=note,
                missed=missed,
                state_lives=bool(holders),
            )
            self._struck.append(blow)

    def _strike(self, strike: Strike) -> tuple[str, bool]:
        """Strikes; tells whom, and whether nobody was there to be struck."""
        match strike.fault:
            case Fault.KILL_WORKER:
                return self._signal_worker(strike, signal.SIGKILL)
            case Fault.TERMINATE_WORKER:
                return self._signal_worker(strike, signal.SIGTERM)
            case Fault.FREEZE_WORKER:
                return self._signal_worker(strike, signal.SIGSTOP)
            case Fault.KILL_ALL_WORKERS:
                return self._signal(self._workers(), signal.SIGKILL)
            case Fault.TERMINATE_ALL_WORKERS:
                return self._signal(self._workers(), signal.SIGTERM)
            case Fault.KILL_RECORDER:
                return self._signal(self._recorder(), signal.SIGKILL)
            case Fault.KILL_NODE | Fault.DRAIN_NODE | Fault.CUT_NODE | Fault.ADD_NODE:
                address = self._ground.strike(strike.fault, strike.worker)
                return address or "left alone: it is the last node", not address
            case Fault.KILL_DRIVER | Fault.STOP_DRIVER:
                assert self._driver is not None
                kills = strike.fault is Fault.KILL_DRIVER
                self._driver.send_signal(signal.SIGKILL if kills else signal.SIGTERM)
                return f"pid {self._driver.pid}", False

    def _signal_worker(self, strike: Strike, number: signal.Signals) -> tuple[str, bool]:
        members = self._workers()
        return self._signal([members[strike.worker % len(members)]], number)

    def _signal(self, members: Sequence[Member], number: signal.Signals) -> tuple[str, bool]:
        """Sends it to all; tells to whom, and whether nobody was there."""
        gone = [member.pid for member in self._ground.signal(members, number)]
        if number is not signal.SIGTERM:
            self._lost.extend(members)
        if not members:
            return "nobody was there", True
        told_pids = "pid " + ", ".join(str(member.pid) for member in members)
        note = told_pids + (f"; gone before: {gone}" if gone else "")
        return note, len(gone) == len(members)

    def _workers(self) -> list[Member]:
        """Living workers of the present attempt, by world rank."""
        if not self._watched.attempts:
            return []
        fields = self._watched.attempts[-1]
        members = [
            Member(host=str(host), pid=int(pid))
            for host, pid in zip(fields["hosts"], fields["pids"], strict=True)
        ]
        return self._ground.living(members)

    def _holders(self) -> list[Member]:
        """Those of the present attempt that still hold the state."""
        return [member for member in self._workers() if member not in self._lost]

    def _recorder(self) -> list[Member]:
        """The process that writes the run, unless it is gone."""
        present = leases.holder(self._run)
        if present is None or present.released:
            return []
        return self._ground.living([Member(host=present.host, pid=present.pid)])


_NEEDS_WORKERS: Final = (
    Fault.KILL_WORKER,
    Fault.KILL_ALL_WORKERS,
    Fault.TERMINATE_WORKER,
    Fault.TERMINATE_ALL_WORKERS,
    Fault.FREEZE_WORKER,
)
# Those who are struck leave as planned: they hand the state over, or save it.
_PLANNED: Final = (
    Fault.TERMINATE_WORKER,
    Fault.TERMINATE_ALL_WORKERS,
    Fault.DRAIN_NODE,
    Fault.STOP_DRIVER,
)
_ENDS_DRIVER: Final = (Fault.KILL_DRIVER, Fault.STOP_DRIVER, Fault.TERMINATE_ALL_WORKERS)


def _for_drill(spec: JobSpec, storage: str, num_nodes: int | None) -> JobSpec:
    """The job with what a drill decides; nothing of it affects bits."""
    most = min(spec.workers.max, spec.shards, num_nodes or spec.workers.max)
    return spec.model_copy(
        update={
            "storage": storage,
            "workers": spec.workers.model_copy(update={"max": max(spec.workers.min, most)}),
            "tracking": spec.tracking.model_copy(update={"enabled": False}),
            "metrics": spec.metrics.model_copy(update={"enabled": False}),
            "faults": spec.faults.model_copy(
                update={"hang_timeout_s": min(spec.faults.hang_timeout_s, HANG_TIMEOUT_S)}
            ),
        }
    )
