"""What goes wrong on Ray, and what is left of it: never a step, never a process, never a riddle."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from samestep import ExitStatus, JobSpec, PlacementError, train
from samestep.checkpoint.storage import Storage
from samestep.telemetry.past import read_past

MakeSpec = Callable[..., JobSpec]
WaitUntil = Callable[[Callable[[], Any], float, str], Any]

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.timeout(400)]


def test_a_killed_worker_costs_a_restart_and_no_bit(
    make_spec: MakeSpec, folder: Path, tmp_path: Path, wait_until: WaitUntil
) -> None:
    straight = train(make_spec(mode="local"), name="straight", search=[folder])
    gate = tmp_path / "gate"
    gate.mkdir()
    spec = make_spec(mode="ddp", workers=2, args={"pause_s": 0.1, "gate": str(gate)})
    killed: list[int] = []

    def kill_one_at_step_six() -> None:
        def pid_at_step() -> int | None:
            names = [name.split("-") for name in os.listdir(gate)]
            return next((int(pid) for pid, step in names if step == "6"), None)

        pid = wait_until(pid_at_step, 90, "a worker at step 6")
        os.kill(pid, signal.SIGKILL)
        killed.append(pid)

    killer = threading.Thread(target=kill_one_at_step_six)
    killer.start()
    outcome = train(spec, name="killed", search=[folder])
    killer.join()
    assert len(killed) == 1
    assert outcome.status == "done"
    assert len(read_past(Storage.at(outcome.run)).attempts) == 2
    # `gate` and `pause_s` are part of the job, but not of the weights.
    assert outcome.evaluation == straight.evaluation
    assert _weights(outcome.run) == _weights(straight.run)


def test_an_exception_of_the_workload_is_told_whole_and_not_retried(
    make_spec: MakeSpec, folder: Path
) -> None:
    spec = make_spec(mode="ddp", workers=2, args={"raise_at": 5})
    outcome = train(spec, name="raises", search=[folder])
    assert (outcome.status, outcome.exit_status) == ("failed", ExitStatus.FAILED)
    assert "ValueError: the workload's own message" in outcome.message
    assert 'raise ValueError("the workload\'s own message")' in outcome.message
    run = Storage.at(outcome.run)
    assert len(read_past(run).attempts) == 1
    incidents = [
        json.loads(run.read(f"incidents/{i}/incident.json")) for i in run.list("incidents")
    ]
    assert {incident["kind"] for incident in incidents} == {"exception"}
    assert {incident["step"] for incident in incidents} == {5}


def test_a_workload_that_cannot_be_imported_is_bad_input(
    make_spec: MakeSpec, tmp_path: Path
) -> None:
    (tmp_path / "broken.py").write_text("import nowhere_to_be_found\n")
    spec = make_spec(mode="ddp", workers=2, workload="broken:Thing")
    outcome = train(spec, name="broken", search=[tmp_path])
    assert outcome.exit_status is ExitStatus.BAD_INPUT
    assert "No module named 'nowhere_to_be_found'" in outcome.message


def test_no_room_for_the_fewest_workers_is_bad_input_where_nothing_may_fall_back(
    make_spec: MakeSpec, folder: Path
) -> None:
    spec = make_spec(mode="ddp", workers=4, resources={"cpu": 2}, faults={"placement_timeout_s": 1})
    with pytest.raises(PlacementError, match=r"no room for 4 workers of \{'CPU': 2\.0\}"):
        train(spec, name="crowded", search=[folder])


def test_auto_falls_back_to_dataparallel_on_a_single_node_without_room(
    make_spec: MakeSpec, folder: Path
) -> None:
    spec = make_spec(
        mode="auto", workers=4, resources={"cpu": 2}, faults={"placement_timeout_s": 1}
    )
    said: list[str] = []
    outcome = train(
        spec,
        name="fallback",
        search=[folder],
        observer=lambda status: said.extend(item["text"] for item in status["messages"]),
    )
    assert outcome.status == "done"
    assert any("falling back to dataparallel" in text for text in said)
    assert any("dataparallel on cpu: 4 shards, in turn" in text for text in said)


def test_a_second_submit_of_a_live_run_follows_it(
    make_spec: MakeSpec, folder: Path, tmp_path: Path, wait_until: WaitUntil
) -> None:
    gate = tmp_path / "gate"
    gate.mkdir()
    spec = make_spec(mode="ddp", workers=2, args={"pause_s": 0.2, "gate": str(gate)})
    first: list[object] = []
    thread = threading.Thread(
        target=lambda: first.append(train(spec, name="shared", search=[folder]))
    )
    thread.start()
    wait_until(lambda: os.listdir(gate), 90, "the first step")
    said: list[str] = []
    second = train(
        spec,
        name="shared",
        search=[folder],
        observer=lambda status: said.extend(item["text"] for item in status["messages"]),
    )
    thread.join()
    assert first == [second]
    assert said[0].startswith("the run is alive (process")
    assert len(read_past(Storage.at(second.run)).attempts) == 1


def _weights(run: str) -> str:
    from samestep import load_weights
    from samestep.exact.digest import live_digest

    return live_digest(load_weights(run))
