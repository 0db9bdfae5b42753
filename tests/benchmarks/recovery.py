"""How long training stands still after a fault, with peers beside: samestep, torchrun, Ray Train.

Measured is the longest time without a new step (none that was taken before) from one fault to the
next. samestep runs under a drill on Ray nodes of this machine, the others on one; all have two
workers of one thread, and the same model, batch and kind of kill (SIGKILL to one worker).
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from launches import UNWANTED, LaunchError
from models import MODELS
from plain_elastic import LOG

from samestep.cluster.drill import Drill
from samestep.cluster.drilled import RoundResult, Struck
from samestep.cluster.strikes import Fault, Strike
from samestep.exact import numerics

HERE = Path(__file__).resolve().parent
WORKERS = 2
APART_S = 15.0
"""Between two kills, so that a new spare has come up: its imports take seconds."""
PEER_STEPS = 15
TIMEOUT_S = 120.0
END_S = 30.0
OTHERS = {
    Fault.KILL_ALL_WORKERS: "all workers killed",
    Fault.KILL_NODE: "node killed",
    Fault.ADD_NODE: "node joins",
    Fault.DRAIN_NODE: "node drained",
    Fault.CUT_NODE: "link to a node cut",
}
AT_ONCE = (Fault.KILL_ALL_WORKERS, Fault.KILL_NODE, Fault.ADD_NODE, Fault.DRAIN_NODE)
"""In one run, one after another: the node that joins takes the place of the one that was killed."""


def recovery_row(
    model: str, kills: int, *, peer_kills: int, say: Callable[[str], None]
) -> dict[str, Any]:
    """All of it: seconds without a new step by whose they are, and what samestep's runs redid."""
    killed = samestep_kills(model, kills, say)
    struck = [*samestep_others(model, say).struck, *samestep_cut(model, say)]
    held_up_s = {"samestep": [one.held_up_s for one in killed.struck]}
    others_s = {
        OTHERS[one.strike.fault]: [one.held_up_s, one.redone, one.grown_s] for one in struck
    }
    # Told at once: a peer that never comes back must not take these with it.
    say(f"samestep, seconds held up: worker killed {held_up_s['samestep']}, {others_s}")
    for name, measure in (("torchrun", torchrun_kills), ("Ray Train", ray_kills)):
        held_up_s[name] = list(measure(model, peer_kills, say))
        say(f"{name}, seconds held up: worker killed {held_up_s[name]}")
    return {"held_up_s": held_up_s, "others_s": others_s, "redone": killed.redone}


def samestep_kills(model: str, kills: int, say: Callable[[str], None]) -> RoundResult:
    """Kills one of two workers again and again."""
    step_s = _step_s(model)
    apart = max(10, int(APART_S / step_s))
    strikes = [
        Strike(fault=Fault.KILL_WORKER, step=apart * (n + 1), worker=n % WORKERS)
        for n in range(kills)
    ]
    return _drilled(model, strikes, apart * (kills + 1), num_nodes=WORKERS, least=WORKERS, say=say)


def samestep_others(model: str, say: Callable[[str], None]) -> RoundResult:
    """All workers killed, and nodes that go and come; two nodes of one slot, a worker on each."""
    apart = max(10, int(1.5 * APART_S / _step_s(model)))
    strikes = [Strike(fault=fault, step=apart * (n + 1)) for n, fault in enumerate(AT_ONCE)]
    steps = apart * (len(strikes) + 1)
    return _drilled(model, strikes, steps, num_nodes=WORKERS, least=1, say=say)


def samestep_cut(model: str, say: Callable[[str], None]) -> Sequence[Struck]:
    """One of two nodes is cut off and lives on; nothing without root's rights."""
    if os.geteuid() != 0:
        say("a link that is cut is left out: to make and cut links takes root's rights")
        return ()
    apart = max(10, int(APART_S / _step_s(model)))
    strikes = [Strike(fault=Fault.CUT_NODE, step=apart)]
    return _drilled(model, strikes, 2 * apart, num_nodes=WORKERS, least=1, say=say).struck


def torchrun_kills(model: str, kills: int, say: Callable[[str], None]) -> list[float]:
    """Seconds without a new step after each kill, under torchrun's elastic restart."""
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(WORKERS), "--max-restarts", str(kills + 5)),
    ]
    return _peer_kills(model, kills, command, (), say)


def ray_kills(model: str, kills: int, say: Callable[[str], None]) -> list[float]:
    """The same under Ray Train as it comes."""
    return _peer_kills(model, kills, [sys.executable], ("--ray",), say)


def _drilled(
    model: str,
    strikes: list[Strike],
    num_steps: int,
    *,
    num_nodes: int,
    least: int,
    say: Callable[[str], None],
) -> RoundResult:
    job = MODELS[model].spec(shards=WORKERS, workers=WORKERS)
    workers = job.workers.model_copy(update={"min": least, "max": WORKERS})
    changes = {"max_steps": num_steps, "epochs": None, "workers": workers}
    with tempfile.TemporaryDirectory(prefix="samestep-bench-") as folder:
        drill = Drill(
            job.model_copy(update=changes),
            job_folder=MODELS[model].folder,
            folder=Path(folder),
            num_nodes=num_nodes,
            say=say,
        )
        _, result = drill.run([strikes])
    if not result.same:
        raise LaunchError(f"the run under faults has other weights: {result}")
    return result


def _step_s(model: str) -> float:
    """About how long a step takes; only for how far apart faults are."""
    return {"mlp": 0.12, "chargpt": 0.25, "digits": 0.02}[model]


def _peer_kills(
    model: str,
    kills: int,
    command: list[str],
    options: tuple[str, ...],
    say: Callable[[str], None],
) -> list[float]:
    with tempfile.TemporaryDirectory(prefix="samestep-bench-") as temporary:
        folder = Path(temporary)
        (folder / LOG).touch()
        num_steps = PEER_STEPS * (kills + 1)
        with (folder / "output").open("wb") as output:
            process = subprocess.Popen(
                [
                    *command,
                    *(str(HERE / "plain_elastic.py"), model, temporary, str(num_steps)),
                    *options,
                ],
                env=_environment(model),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        killed_at: list[float] = []
        try:
            for number in range(kills):
                line = _wait_for(folder, process, PEER_STEPS * (number + 1), killed_at)
                killed_at.append(time.time())
                os.kill(line["pid"], signal.SIGKILL)
            _wait_for(folder, process, num_steps, killed_at)
        except LaunchError as error:  # it never came back from this kill: those before count
            say(f"after {len(killed_at)} kills: {error}")
        finally:
            _end(process)
        return _held_up(_lines(folder), killed_at)


def _wait_for(
    folder: Path, process: subprocess.Popen[bytes], step: int, killed_at: list[float]
) -> dict[str, Any]:
    """The line of worker 1 of a step, by a process that was started after the last kill."""
    pause, end = threading.Event(), time.monotonic() + TIMEOUT_S
    while time.monotonic() < end:
        for line in _lines(folder):
            late = not killed_at or line["time"] > killed_at[-1]
            if line["rank"] == 1 and line["step"] >= step and late:
                return line
        if process.poll() is not None:
            break
        pause.wait(0.02)
    text = (folder / "output").read_text(errors="replace")[-600:]
    raise LaunchError(f"step {step} did not come within {TIMEOUT_S:g} s:\n{text}")


def _lines(folder: Path) -> list[dict[str, Any]]:
    whole = (folder / LOG).read_text().rpartition("\n")[0]
    return [json.loads(line) for line in whole.splitlines()]


def _held_up(lines: list[dict[str, Any]], killed_at: list[float]) -> list[float]:
    times: list[float] = []
    newest = 0
    for line in lines:
        if line["rank"] == 0 and line["step"] > newest:
            newest = line["step"]
            times.append(line["time"])
    until = [*killed_at[1:], float("inf")]
    found = []
    for start, stop in zip(killed_at, until, strict=True):
        gaps = [b - max(a, start) for a, b in itertools.pairwise(times) if start < b <= stop]
        found += [max(gaps)] if gaps else []
    return found


def _environment(model: str) -> dict[str, str]:
    spec = MODELS[model].spec(shards=WORKERS, workers=WORKERS)
    kept = {name: value for name, value in os.environ.items() if name not in UNWANTED}
    return {"GLOO_SOCKET_IFNAME": "lo", **kept, **numerics.environment(spec)}


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends what was started, by its session."""
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
