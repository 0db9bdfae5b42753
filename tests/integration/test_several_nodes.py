"""Several raylets on loopback addresses: each is a node to Ray, as on a cluster."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.util.placement_group import placement_group_table

from samestep import ExitStatus, JobSpec, Outcome, PlacementError, parse_spec, train
from samestep.checkpoint import shared_memory
from samestep.checkpoint.reading import digest_of
from samestep.checkpoint.storage import Storage
from samestep.cluster.environment import TRAIN_ENVIRONMENT
from samestep.cluster.leftovers import forget_on_all_nodes
from samestep.cluster.nodes import LocalNodes, Node, local_nodes, num_alive
from samestep.exact import numerics
from samestep.replay.summary import summarize
from samestep.telemetry.past import read_past

MakeSpec = Callable[..., JobSpec]
WaitUntil = Callable[[Callable[[], Any], float, str], Any]

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def nodes() -> Iterator[LocalNodes]:
    """A head without slots, and two nodes of one slot; this process is a driver on the head."""
    spec = parse_spec({"workload": "tiny:Tiny", "batch_size": 16, "epochs": 1})
    variables = {**numerics.environment(spec), **TRAIN_ENVIRONMENT}
    with local_nodes(2, worker_env=variables) as made:
        yield made


def test_no_node_waits_for_a_port_that_another_one_has(nodes: LocalNodes) -> None:
    found = list(nodes._folder.glob("*/session_2*/logs/dashboard_agent.log"))
    assert len(found) == 3
    assert not [path for path in found if "failed to bind" in path.read_text().lower()]


@pytest.mark.usefixtures("nodes")
def test_a_job_for_many_machines_never_ends_up_on_one_unnoticed(
    make_spec: MakeSpec, folder: Path
) -> None:
    spec = make_spec(mode="auto", workers=4, faults={"placement_timeout_s": 1})
    said: list[Any] = []
    with pytest.raises(PlacementError, match=r"no room for 4 workers .* 2 slots on 2 node\(s\)"):
        train(spec, name="wide", search=[folder], observer=said.append)


def test_a_wait_for_room_is_told_and_ends_in_an_incident(
    nodes: LocalNodes, make_spec: MakeSpec, folder: Path, tmp_path: Path, wait_until: WaitUntil
) -> None:
    gate = tmp_path / "gate"
    gate.mkdir()
    third = nodes.add()
    spec = make_spec(
        mode="ddp",
        workers=3,
        args={"pause_s": 0.3, "gate": str(gate)},
        faults={"replacement_timeout_s": 25},
    )

    def strike() -> None:
        wait_until(third_at_work, 120, "three workers")
        nodes.kill(third)

    def third_at_work() -> bool:
        return any(third.owns(int(name.split("-")[0])) for name in os.listdir(gate))

    said: list[str] = []
    seats: list[list[str]] = []

    def observe(status: dict[str, Any]) -> None:
        said.extend(item["text"] for item in status["messages"])
        if any(text.startswith("waiting for workers: 2 of") for text in said):
            states = [entry["state"] for entry in placement_group_table().values()]
            seats.append(sorted(state for state in states if state != "REMOVED"))

    striker = threading.Thread(target=strike)
    striker.start()
    outcome = train(spec, name="waits", search=[folder], observer=observe)
    striker.join()
    # Not "RESCHEDULING": Ray's head would try that without a pause.
    asked_anew = ["CREATED", "CREATED", "PENDING"]
    assert asked_anew in seats
    assert not any("RESCHEDULING" in states for states in seats[seats.index(asked_anew) :])
    assert (outcome.status, outcome.exit_status) == ("failed", ExitStatus.BAD_INPUT)
    lacking = "2 of at least 3 workers of {'CPU': 1.0} have room"
    assert outcome.message.startswith(f"{lacking} after 25 s: free the cluster, add nodes")
    waits = [text for text in said if text.startswith("waiting for workers: 2 of at least 3")]
    assert len(set(waits)) == 1
    assert waits[0].endswith(f"{lacking}; gives up after 25 s (faults.replacement_timeout_s)")
    found = summarize(Storage.at(outcome.run))
    assert [str(incident.kind) for incident in found.incidents][-1] == "no_room"
    assert found.incidents[-1].message == outcome.message


def test_a_run_that_is_over_leaves_nothing_in_the_memory_of_a_node_it_had_left(
    nodes: LocalNodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait_until: WaitUntil
) -> None:
    num_before = num_alive()
    apart = nodes.add(env={"SAMESTEP_SHARED_MEMORY": str(tmp_path)})
    nodes.wait_for(num_before + 1, num_alive)
    with monkeypatch.context() as there:
        there.setenv("SAMESTEP_SHARED_MEMORY", str(tmp_path))
        left, other = (shared_memory.make_folder(uri) for uri in ("/runs/over", "/runs/alive"))
    (left / "snapshot-0").write_bytes(b"a copy")
    forget_on_all_nodes("/runs/over")
    assert not left.exists()
    assert other.exists()
    nodes.kill(apart)
    wait_until(lambda: num_alive() == num_before, 30, "the node is gone")


def test_nodes_come_and_go_and_no_step_is_taken_twice(
    nodes: LocalNodes, make_spec: MakeSpec, folder: Path, tmp_path: Path, wait_until: WaitUntil
) -> None:
    gate = tmp_path / "gate"
    gate.mkdir()
    fields = {"epochs": None, "max_steps": 600, "evaluate": {"every_epochs": 20}}
    straight = train(make_spec(mode="local", **fields), name="straight", search=[folder])
    spec = make_spec(
        mode="ddp",
        workers={"min": 1, "max": 4},
        args={"pause_s": 0.2, "gate": str(gate)},
        checkpoint={"every_steps": 1000},
        **fields,
    )
    added: list[Node] = []
    sizes: list[int] = []

    def settled(num_workers: int) -> bool:
        run = Storage.at(f"{spec.storage}/moved")
        if not run.exists("spec.yaml"):
            return False
        attempts = read_past(run).attempts
        return bool(attempts) and attempts[-1].fields["world_size"] == num_workers

    def stir() -> None:
        with suppress(AssertionError):  # told by what is missing in `sizes`
            wait_until(lambda: settled(2), 120, "two workers")
            sizes.append(2)
            added.extend(nodes.add() for _ in range(2))
            wait_until(lambda: settled(4), 120, "four workers")
            sizes.append(4)
            _drain(nodes.address, added[0])
            wait_until(lambda: settled(2), 60, "two workers again")
            sizes.append(2)
            nodes.kill(added.pop())
        (gate / "fast").touch()

    thread = threading.Thread(target=stir)
    thread.start()
    outcome = train(spec, name="moved", search=[folder])
    thread.join()
    for node in added:
        nodes.kill(node)
    assert sizes == [2, 4, 2]
    assert (outcome.status, outcome.digest) == ("done", straight.digest)
    found = summarize(Storage.at(outcome.run))
    assert found.num_redone == 0
    assert [r["cause"] for r in found.recoveries][:2] == ["grow", "drain"]
    assert all(r["planned"] for r in found.recoveries[:2])


def test_a_run_that_is_struck_stopped_and_resumed_never_touches_the_other_on_the_cluster(
    nodes: LocalNodes,
    write_job: Callable[..., Path],
    start_command: Callable[..., subprocess.Popen[str]],
    wait_until: WaitUntil,
    straight: Outcome,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", nodes.address)
    gate = tmp_path / "gate"
    gate.mkdir()
    # Slow until the one is resumed, so that the other is at work all the time.
    job = write_job(workers=1, mode="ddp", args={"pause_s": 5.0, "gate": str(gate)})
    moved, calm = (Storage.at(str(tmp_path / "runs" / name)) for name in ("moved", "calm"))

    def pid(run: Storage) -> int:
        """Of its worker, once it has taken steps."""
        past = read_past(run) if run.exists("spec.yaml") else None
        return int(past.attempts[-1].fields["pids"][0]) if past and past.num_steps else 0

    def num_steps(attempt: int) -> int:
        past = read_past(moved)
        return past.num_steps if len(past.attempts) == attempt else 0

    first, other = (
        start_command("train", job, "--name", name, cwd=tmp_path) for name in ("moved", "calm")
    )
    wait_until(lambda: pid(moved) and pid(calm), 120, "both runs train")
    struck = pid(moved)
    assert struck != pid(calm)
    os.kill(struck, signal.SIGKILL)
    wait_until(lambda: num_steps(2) > 1, 120, "the run that was struck has gone on")
    first.terminate()
    output, _ = first.communicate(timeout=120)
    assert first.returncode == ExitStatus.INTERRUPTED, output
    stopped_at = num_steps(2)
    assert 1 < stopped_at < 12
    assert other.poll() is None
    again = start_command("train", job, "--name", "moved", cwd=tmp_path)
    wait_until(lambda: num_steps(3) > stopped_at, 120, "the run has gone on")
    (gate / "fast").touch()
    for command in (again, other):
        output, _ = command.communicate(timeout=120)
        assert command.returncode == 0, output
    assert [digest_of(run.root) for run in (moved, calm)] == [straight.digest] * 2
    found = [summarize(run) for run in (moved, calm)]
    assert [len(one.attempts) for one in found] == [3, 1]
    assert found[0].attempts[-1].start_step == stopped_at
    assert [[str(incident.kind) for incident in one.incidents] for one in found] == [["crash"], []]
    assert found[1].num_redone == 0


def test_a_drill_on_a_cluster_that_is_given_strikes_its_own_run(
    nodes: LocalNodes, write_job: Callable[..., Path], tmp_path: Path
) -> None:
    job = write_job(workers={"min": 1, "max": 2}, args={"pause_s": 0.1}, epochs=18)
    faults = tmp_path / "faults.yaml"
    faults.write_text("- {fault: kill_recorder, step: 3}\n- {fault: kill_worker, step: 5}\n")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "samestep", "drill", job, "--faults", faults, "--json"),
            *("--address", nodes.address),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    calm, struck = json.loads(done.stdout)
    assert (struck["status"], struck["digest"], struck["same"]) == ("done", calm["digest"], True)
    assert [one["note"][:4] for one in struck["struck"]] == ["pid "] * 2
    assert struck["attempts"] in (2, 3)  # it may go on with the other alone, and grow


def _drain(address: str, node: Node) -> None:
    """Tells Ray that a node will be taken away, as a preemption notice does."""
    [known] = [known for known in ray.nodes() if known["NodeManagerAddress"] == node.address]
    subprocess.run(
        [
            *(str(Path(sys.executable).parent / "ray"), "drain-node", "--address", address),
            *("--node-id", known["NodeID"], "--reason", "DRAIN_NODE_REASON_PREEMPTION"),
            *("--reason-message", "the test takes it away", "--deadline-remaining-seconds", "300"),
        ],
        check=True,
        timeout=60,
        capture_output=True,
    )
