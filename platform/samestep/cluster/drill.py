"""A drill: a job once undisturbed, then under faults, and whether the weights are the same.

The driver of each run is a process of its own, as a user's would be; the nodes are several raylets
on this machine. Strikes are triggered by what the run's ledger says.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from samestep.checkpoint.storage import Storage
from samestep.cluster.nodes import LocalNodes, Node, local_nodes, num_alive
from samestep.cluster.strikes import Fault, Strike, random_strikes
from samestep.errors import ExitStatus, InputError, SamestepError
from samestep.names import Env, Event, RunState
from samestep.spec import JobSpec, dump_spec
from samestep.telemetry.identity import read_result
from samestep.telemetry.records import STEP
from samestep.telemetry.tail import LedgerTail

POLL_S: Final = 0.02
RUN_TIMEOUT_S: Final = 3600.0
HANG_TIMEOUT_S: Final = 10.0
MAX_STARTS: Final = 20
OUTPUT_SHOWN: Final = 4000

Say = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Struck:
    """A fault that struck, and what it cost.

    Attributes:
        strike: what it was to be.
        at_step: steps taken when it struck.
        held_up_s: the longest time between two new steps from then to the next strike.
        redone: steps taken again from then to the next strike.
        note: where it could not strike, why.
    """

    strike: Strike
    at_step: int
    held_up_s: float | None
    redone: int
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class RoundResult:
    """One run of a drill.

    Attributes:
        name: of the run.
        status: as its result says.
        digest: of its last checkpoint.
        same: its digest is the undisturbed run's.
        steps: in the ledger.
        redone: steps taken again, over all attempts.
        attempts: how many there were.
        wall_s: from the first start of its driver to the last end.
        struck: the faults in order.
        message: why it failed.
    """

    name: str
    status: str
    digest: str
    same: bool
    steps: int
    redone: int
    attempts: int
    wall_s: float
    struck: tuple[Struck, ...]
    message: str = ""


@dataclass(kw_only=True)
class _Watched:
    """What the ledger of the present run has said so far."""

    num_steps: int = 0
    redone: int = 0
    attempts: list[dict[str, Any]] = field(default_factory=list)
    step_times: list[float] = field(default_factory=list)
    redone_at: list[tuple[float, int]] = field(default_factory=list)

    def take(self, line: dict[str, Any]) -> None:
        if line["type"] == STEP:
            self.num_steps = max(self.num_steps, line["step"] + 1)
            self.step_times.append(line["timing"].get("at_s", line["time"]))
        elif line["event"] == Event.ATTEMPT_STARTED:
            self.attempts.append(line["fields"])
        elif line["event"] == Event.ATTEMPT_ENDED:
            redone = int(line["fields"].get("redone", 0))
            self.redone += redone
            self.redone_at.append((line["time"], redone))


class Drill:
    """Runs a job on local nodes, with and without faults.

    Args:
        spec: the job; where its runs lie, how many workers, and telemetry are set by the drill.
        job_folder: where its workload is looked for.
        folder: for runs and output; must exist.
        num_nodes: nodes of one slot each.
        say: told what happens.
    """

    def __init__(
        self, spec: JobSpec, *, job_folder: Path, folder: Path, num_nodes: int, say: Say
    ) -> None:
        if spec.workers.min > num_nodes:
            raise InputError(
                f"the job needs at least {spec.workers.min} workers, the drill has {num_nodes} "
                "nodes of one slot: give it more with --nodes"
            )
        self._job = folder / "job.yaml"
        self._job_folder = job_folder
        self._folder = folder
        self._num_nodes = num_nodes
        self.say = say
        self._spec = _for_drill(spec, folder, num_nodes)
        self._job.write_text(dump_spec(self._spec), encoding="utf-8")

    def run(self, rounds: Sequence[Sequence[Strike]] | tuple[int, int]) -> list[RoundResult]:
        """The undisturbed run first, then one run per round.

        Args:
            rounds: the strikes of each; or (seed, number of rounds) for random ones.
        """
        with local_nodes(self._num_nodes) as nodes:
            calm = _Round(self, nodes, "calm", ()).run("")
            self.say(told(calm))
            results = [calm]
            if calm.status != RunState.DONE:
                return results
            for number, strikes in enumerate(self._strikes(rounds, calm.steps)):
                self._restore(nodes)
                result = _Round(self, nodes, f"round-{number}", strikes).run(calm.digest)
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

    @property
    def folder(self) -> Path:
        """Where runs and output lie."""
        return self._folder

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

    def _restore(self, nodes: LocalNodes) -> None:
        """As many nodes as at the start, for the next round."""
        while len(nodes.nodes) > self._num_nodes:
            nodes.kill(nodes.nodes[-1])
        while len(nodes.nodes) < self._num_nodes:
            nodes.add()
        nodes.wait_for(self._num_nodes, num_alive)


class _Round:
    """One run, from its first driver to its end."""

    def __init__(
        self, drill: Drill, nodes: LocalNodes, name: str, strikes: Sequence[Strike]
    ) -> None:
        self._drill = drill
        self._nodes = nodes
        self._name = name
        self._due = list(strikes)
        self._struck: list[tuple[Strike, int, float, str]] = []
        self._watched = _Watched()
        self._run = Storage.at(str(drill.folder / "runs" / name))
        self._tail = LedgerTail(self._run)
        self._output = drill.folder / f"{name}.log"
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
        self._watch()
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
            struck=tuple(self._costs()),
            message=message or str(result.get("message", "")),
        )

    def _drive(self, deadline: float) -> None:
        pause = threading.Event()
        for _ in range(MAX_STARTS):
            self._driver = self._drill.start_driver(self._name, self._output, self._nodes.address)
            num_struck = len(self._struck)
            while self._driver.poll() is None:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"not done within {RUN_TIMEOUT_S:g} s")
                self._watch()
                self._strike_what_is_due()
                pause.wait(POLL_S)
            self._watch()
            status = self._driver.returncode
            if status == ExitStatus.DONE:
                return
            stopped = any(strike.fault in _ENDS_DRIVER for strike, *_ in self._struck[num_struck:])
            if not stopped:
                raise InputError(
                    f"the driver ended with {status}:\n{self._output_end()}\n(all of it: "
                    f"{self._output})"
                )
        raise InputError(f"the driver was started {MAX_STARTS} times, and the run is not done")

    def _output_end(self) -> str:
        return self._output.read_text(errors="replace")[-OUTPUT_SHOWN:]

    def _watch(self) -> None:
        for line in self._tail.new_lines():
            self._watched.take(line)

    def _strike_what_is_due(self) -> None:
        while self._due and self._watched.num_steps >= self._due[0].step:
            strike = self._due[0]
            if strike.fault in _NEEDS_WORKERS and not self._workers():
                return  # between two groups: it strikes the next one
            self._due.pop(0)
            at_s = time.time()
            note = self._strike(strike)
            self._drill.say(
                f"{self._name}: {strike.fault} at step {self._watched.num_steps}"
                + (f" ({note})" if note else "")
            )
            self._struck.append((strike, self._watched.num_steps, at_s, note))

    def _strike(self, strike: Strike) -> str:
        match strike.fault:
            case Fault.KILL_WORKER:
                return self._signal_worker(strike, signal.SIGKILL)
            case Fault.TERMINATE_WORKER:
                return self._signal_worker(strike, signal.SIGTERM)
            case Fault.FREEZE_WORKER:
                return self._signal_worker(strike, signal.SIGSTOP)
            case Fault.KILL_ALL_WORKERS:
                return _signal(self._workers(), signal.SIGKILL)
            case Fault.TERMINATE_ALL_WORKERS:
                return _signal(self._workers(), signal.SIGTERM)
            case Fault.KILL_RECORDER:
                pids = [pid for node in self._all_nodes() for pid in node.pids(RECORDER_TITLE)]
                return _signal(pids, signal.SIGKILL)
            case Fault.KILL_NODE | Fault.DRAIN_NODE:
                if len(self._nodes.nodes) < 2:
                    return "left alone: it is the last node"
                node = self._nodes.nodes[strike.worker % len(self._nodes.nodes)]
                (self._nodes.kill if strike.fault is Fault.KILL_NODE else self._nodes.drain)(node)
                return node.address
            case Fault.ADD_NODE:
                return self._nodes.add().address
            case Fault.KILL_DRIVER | Fault.STOP_DRIVER:
                assert self._driver is not None
                kills = strike.fault is Fault.KILL_DRIVER
                return _signal([self._driver.pid], signal.SIGKILL if kills else signal.SIGTERM)

    def _signal_worker(self, strike: Strike, number: signal.Signals) -> str:
        pids = self._workers()
        return _signal([pids[strike.worker % len(pids)]], number)

    def _workers(self) -> list[int]:
        """Living workers of the present attempt, by world rank."""
        if not self._watched.attempts:
            return []
        pids = [int(pid) for pid in self._watched.attempts[-1].get("pids", [])]
        return [pid for pid in pids if any(node.owns(pid) for node in self._all_nodes())]

    def _all_nodes(self) -> list[Node]:
        return [*self._nodes.nodes, self._nodes.head]

    def _costs(self) -> list[Struck]:
        times = sorted(self._watched.step_times)
        found = []
        for number, (strike, at_step, at_s, note) in enumerate(self._struck):
            rest = self._struck[number + 1 :]
            until = rest[0][2] if rest else float("inf")
            gaps = [b - a for a, b in itertools.pairwise(times) if at_s < b <= until]
            found.append(
                Struck(
                    strike=strike,
                    at_step=at_step,
                    held_up_s=max(gaps) if gaps else None,
                    redone=sum(n for t, n in self._watched.redone_at if at_s < t <= until),
                    note=note,
                )
            )
        return found


RECORDER_TITLE: Final = "ray::RecorderHost"
_NEEDS_WORKERS: Final = (
    Fault.KILL_WORKER,
    Fault.KILL_ALL_WORKERS,
    Fault.TERMINATE_WORKER,
    Fault.TERMINATE_ALL_WORKERS,
    Fault.FREEZE_WORKER,
)
_ENDS_DRIVER: Final = (Fault.KILL_DRIVER, Fault.STOP_DRIVER, Fault.TERMINATE_ALL_WORKERS)


def told(result: RoundResult) -> str:
    """A round in a line."""
    return (
        f"{result.name}: {result.status}, {result.steps} steps, {result.attempts} attempts, "
        f"{result.redone} redone, {result.wall_s:.1f} s, {result.digest[:12]}"
        + (f": {result.message}" if result.message else "")
    )


def _for_drill(spec: JobSpec, folder: Path, num_nodes: int) -> JobSpec:
    """The job with what a drill decides; nothing of it affects bits."""
    most = min(spec.workers.max, num_nodes, spec.shards)
    return spec.model_copy(
        update={
            "storage": str(folder / "runs"),
            "workers": spec.workers.model_copy(update={"max": max(spec.workers.min, most)}),
            "tracking": spec.tracking.model_copy(update={"enabled": False}),
            "metrics": spec.metrics.model_copy(update={"enabled": False}),
            "faults": spec.faults.model_copy(
                update={"hang_timeout_s": min(spec.faults.hang_timeout_s, HANG_TIMEOUT_S)}
            ),
        }
    )


def _signal(pids: Sequence[int], number: signal.Signals) -> str:
    """Sends it to all; tells to whom."""
    gone = []
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            gone.append(pid)
    told_pids = ", ".join(str(pid) for pid in pids) or "nobody was there"
    return f"pid {told_pids}" + (f"; gone before: {gone}" if gone else "")
