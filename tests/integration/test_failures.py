"""What goes wrong on Ray, and what is left of it: never a step, never a process, never a riddle."""

from __future__ import annotations

import math
import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from ray.util.placement_group import placement_group, remove_placement_group
from tracked_story import history, only_run

from samestep import ExitStatus, JobSpec, Outcome, PlacementError, train
from samestep.checkpoint.storage import Storage
from samestep.cluster.actors import close_recorder, start_recorder
from samestep.cluster.placement import settle_mode
from samestep.cluster.session import Session
from samestep.errors import RunInUseError
from samestep.replay.compare import Verdict, compare_runs
from samestep.replay.summary import summarize
from samestep.spec import Mode, dump_spec
from samestep.telemetry import ledger
from samestep.telemetry.lease import holder
from samestep.telemetry.link import Patient
from samestep.telemetry.past import read_past
from samestep.telemetry.records import StepRecord
from samestep.telemetry.sinks import plan_sinks
from samestep.telemetry.targets import announced

MakeSpec = Callable[..., JobSpec]
WaitUntil = Callable[[Callable[[], Any], float, str], Any]

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.timeout(400)]


def test_workers_that_end_cost_a_restart_and_no_bit(
    make_spec: MakeSpec, folder: Path, tmp_path: Path, wait_until: WaitUntil, straight: Outcome
) -> None:
    gate = tmp_path / "gate"
    gate.mkdir()
    spec = make_spec(
        mode="ddp",
        workers=2,
        args={"pause_s": 0.3, "gate": str(gate)},
        faults={"spares": 1},
    )
    strikes = {2: [signal.SIGTERM], 6: [signal.SIGKILL], 9: [signal.SIGKILL] * 2}
    pids = struck(gate, wait_until, strikes)
    outcome = train(spec, name="struck", search=[folder])
    assert len(pids()) == 4
    # `gate` and `pause_s` are part of the job, but not of the weights.
    assert (outcome.status, outcome.digest) == ("done", straight.digest)
    assert outcome.evaluation == straight.evaluation
    found = summarize(Storage.at(outcome.run))
    # Of two that die at once Ray may tell of the first alone before the group is taken apart.
    assert [str(incident.kind) for incident in found.incidents] in (["crash"] * 2, ["crash"] * 3)
    # What strikes before training goes on belongs to the same recovery.
    planned = [recovery["planned"] for recovery in found.recoveries]
    assert planned in ([True, False], [True, False, False])
    # Nothing while one of them lives; of the last two the recorder may have had their step, or not.
    redone = [attempt.num_redone for attempt in found.attempts]
    assert redone[:3] == [0, 0, 0]
    assert sum(redone) <= 3
    for recovery in found.recoveries:
        assert recovery["workers"] == [2, 2]
        assert 0 < recovery["again_s"] < 60


def test_a_run_of_all_workers_that_stop_and_an_actor_that_dies_is_one_mlflow_run(
    make_spec: MakeSpec, folder: Path, tmp_path: Path, wait_until: WaitUntil, straight: Outcome
) -> None:
    gate = tmp_path / "gate"
    gate.mkdir()
    job: dict[str, Any] = {
        "args": {"pause_s": 0.3, "gate": str(gate), "odd_metrics": True},
        "tracking": {"enabled": True},
    }
    spec = make_spec(mode="ddp", workers=2, **job)
    pids = struck(gate, wait_until, {4: [signal.SIGTERM] * 2})
    stopped = train(spec, name="struck", search=[folder])
    assert len(pids()) == 2
    assert (stopped.status, stopped.exit_status) == ("interrupted", ExitStatus.INTERRUPTED)
    assert stopped.message == "SIGTERM to all workers"
    assert 4 <= stopped.step < 10
    pids = struck(gate, wait_until, {10: [signal.SIGKILL]}, num_workers=1)
    resumed = train(make_spec(mode="dataparallel", **job), name="struck", search=[folder])
    assert len(pids()) == 1
    assert (resumed.status, resumed.digest) == ("done", straight.digest)
    run = Storage.at(resumed.run)
    found = summarize(run)
    assert [attempt.start_step for attempt in found.attempts][:2] == [0, stopped.step]
    [incident] = found.incidents
    assert (str(incident.kind), incident.attempt) == ("crash", 2)
    assert incident.message.startswith("the training process was lost: its process died")

    uri = f"sqlite:///{tmp_path}/runs/mlflow.db"
    tracked = only_run(uri)
    assert tracked.info.status == "FINISHED"
    run_id, tags = tracked.info.run_id, tracked.data.tags
    steps = ledger.steps(run)
    assert history(uri, run_id, "loss") == [(step, steps[step].loss) for step in range(12)]
    recall = [(step, steps[step].metrics["recall@10"]) for step in range(12)]
    assert history(uri, run_id, "train/recall:40:10") == recall
    undefined = history(uri, run_id, "train/of none")
    assert [(step, math.isnan(value)) for step, value in undefined] == [
        (n, True) for n in range(12)
    ]
    assert [step for step, _ in history(uri, run_id, "eval/accuracy")] == [4, 8, 12]
    assert tags["samestep.state_digest"] == straight.digest
    assert (tags["samestep.mode"], tags["samestep.workers"]) == ("dataparallel", "1")
    assert (tags["samestep.attempt"], tags["samestep.incidents"]) == ("3", "1")
    then = f"2-3: dataparallel, 1 worker from step {stopped.step}"
    assert tags["samestep.attempts"] == f"1: ddp, 2 workers from step 0; {then}"
    known = {"cluster", "numerics", "version.torch", "version.python", "version.ray"}
    assert {f"samestep.{name}" for name in known} <= tags.keys()


def test_a_run_goes_back_to_the_same_weights_in_every_mode_and_beside_a_crash(
    make_spec: MakeSpec, folder: Path, tmp_path: Path, wait_until: WaitUntil
) -> None:
    gate = tmp_path / "gate"
    gate.mkdir()
    goes_back = {"non_finite": "rollback", "rollback_steps": 3}
    args = {"nan_at": 7, "pause_s": 0.1, "gate": str(gate)}
    spec = make_spec(mode="ddp", workers=2, args=args, incidents=goes_back)
    pids = struck(gate, wait_until, {6: [signal.SIGKILL]})
    in_group = train(spec, name="group", search=[folder])
    assert len(pids()) == 1
    spec = make_spec(mode="dataparallel", args={"nan_at": 7}, incidents=goes_back)
    in_actor = train(spec, name="actor", search=[folder])
    told = {"leave_out": [[4, 8]]}
    spec = make_spec(mode="local", args={"nan_at": 7}, incidents=told)
    alone = train(spec, name="told", search=[folder])
    assert alone.status == "done"
    assert in_group.digest == in_actor.digest == alone.digest
    found = summarize(Storage.at(in_group.run))
    assert [(back.to, back.until) for back in found.rollbacks] == [(4, 8)]
    assert [recovery["cause"] for recovery in found.recoveries] == ["crash", "rollback"]
    assert [attempt.start_step for attempt in found.attempts][-1] == 4


def test_a_recorder_that_is_told_to_end_gives_the_run_back_at_once_and_comes_again(
    make_spec: MakeSpec, folder: Path, wait_until: WaitUntil
) -> None:
    spec = make_spec()
    run = Storage.at(f"{spec.storage}/r")
    plan = plan_sinks(spec, run.uri, workload_folder=folder, environ={})
    actor, target = start_recorder(plan, run.uri, "r", dump_spec(spec))
    try:
        info = {"start_step": 0, "mode": "ddp", "world_size": 1}
        attempt = target.call("begin_attempt", info)
        target.call("push", attempt, "0", 1, [step_record(step) for step in range(5)])
        before = holder(run)
        assert before is not None
        assert list(announced(Storage.at(spec.storage))) == ["r"]
        os.kill(before.pid, signal.SIGTERM)
        # Nobody calls it meanwhile: its driver may be gone.
        wait_until(lambda: not psutil.pid_exists(before.pid), 20, "its process has ended")
        after = holder(run)
        assert after is not None
        assert (after.owner, after.released) == (before.owner, True)
        assert announced(Storage.at(spec.storage)) == {}
        assert read_past(run).num_steps == 5
        again = Patient(target)
        ack = again.call("push", attempt, "0", 2, [step_record(step) for step in range(5, 7)])
        assert (ack["acknowledged"], ack["refused"]) == (2, False)
        assert read_past(run).num_steps == 7
        assert list(announced(Storage.at(spec.storage))) == ["r"]
    finally:
        close_recorder(actor, target)


def step_record(step: int) -> dict[str, Any]:
    return StepRecord(
        step=step,
        epoch=0,
        samples=16,
        loss=0.5,
        shard_losses=[0.5] * 4,
        shard_weights=[4.0] * 4,
        grad_norm=1.0,
        lr=[0.1],
        ids=f"{step:032x}",
        metrics={},
        timing={},
    ).to_json()


def struck(
    gate: Path,
    wait_until: WaitUntil,
    strikes: dict[int, list[signal.Signals]],
    *,
    num_workers: int = 2,
) -> Callable[[], list[int]]:
    """Signals workers once all are at a step; gives a call that waits for it, and whom it hit."""
    hit: list[int] = []

    def at(step: int) -> list[int] | None:
        names = [name.split("-") for name in os.listdir(gate)]
        pids = [int(pid) for pid, there in names if int(there) == step]
        return pids if len(pids) == num_workers else None

    def strike() -> None:
        for step, signals in strikes.items():
            pids = wait_until(partial(at, step), 240, f"all workers at step {step}")
            for pid, number in zip(pids, signals, strict=False):
                os.kill(pid, number)
                hit.append(pid)

    striker = threading.Thread(target=strike)
    striker.start()

    def pids() -> list[int]:
        striker.join()
        return hit

    return pids


def test_a_workload_that_cannot_be_imported_is_bad_input(
    make_spec: MakeSpec, tmp_path: Path
) -> None:
    (tmp_path / "broken.py").write_text("import nowhere_to_be_found\n")
    spec = make_spec(mode="ddp", workers=1, workload="broken:Thing")
    outcome = train(spec, name="broken", search=[tmp_path])
    assert outcome.exit_status is ExitStatus.BAD_INPUT
    assert "No module named 'nowhere_to_be_found'" in outcome.message
    assert f'File "{tmp_path}/broken.py", line 1' in outcome.message


def test_no_room_for_the_fewest_workers_is_bad_input_where_nothing_may_fall_back(
    make_spec: MakeSpec, folder: Path
) -> None:
    spec = make_spec(mode="ddp", workers=4, resources={"cpu": 2}, faults={"placement_timeout_s": 1})
    with pytest.raises(PlacementError, match=r"no room for 4 workers of \{'CPU': 2\.0\}"):
        train(spec, name="crowded", search=[folder])


def test_auto_falls_back_to_dataparallel_on_a_single_node_without_room(
    make_spec: MakeSpec, folder: Path, straight: Outcome
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
    compared = compare_runs(Storage.at(straight.run), Storage.at(outcome.run))
    assert (compared.verdict, compared.num_compared) == (Verdict.IDENTICAL, 12)


def test_auto_settles_for_what_there_is_room_for_now(make_spec: MakeSpec) -> None:
    session = Session(is_local=True, num_nodes=1, is_copied=False, address="", notes=[])
    # What the job before has given back may still be on its way: only what must fail is hurried.
    alone = make_spec(mode="auto", workers=1, resources={"cpu": 3})
    told = "a single node with 1 slot(s): falling back to dataparallel"
    assert settle_mode(alone, session, no_fallback=False) == (Mode.DATAPARALLEL, told)
    assert settle_mode(alone, session, no_fallback=True) == (Mode.DDP, "")
    assert settle_mode(make_spec(mode="auto"), session, no_fallback=False) == (Mode.DDP, "")
    two = make_spec(mode="auto", workers=2, faults={"placement_timeout_s": 1})
    taken = placement_group([{"CPU": 1.0}] * 3)
    assert taken.wait(60)
    try:
        mode, why = settle_mode(two, session, no_fallback=False)
        with pytest.raises(PlacementError, match=r"no room for 2 workers .* lower workers\.min"):
            settle_mode(two, session, no_fallback=True)
    finally:
        remove_placement_group(taken)
    assert mode is Mode.DATAPARALLEL
    assert why.startswith("no room for 2 workers of {'CPU': 1.0} within 1 s (the cluster has 4")
    assert why.endswith("falling back to dataparallel")


def test_a_second_submit_of_a_live_run_follows_it(
    make_spec: MakeSpec, folder: Path, tmp_path: Path, wait_until: WaitUntil, straight: Outcome
) -> None:
    gate = tmp_path / "gate"
    gate.mkdir()
    spec = make_spec(mode="ddp", workers=1, args={"pause_s": 0.2, "gate": str(gate)})
    first: list[object] = []
    thread = threading.Thread(
        target=lambda: first.append(train(spec, name="shared", search=[folder]))
    )
    thread.start()
    wait_until(lambda: os.listdir(gate), 90, "the first step")
    with pytest.raises(RunInUseError, match=r"is alive \(process .*stop it before it is started"):
        train(spec, name="shared", search=[folder], restart=True)
    said: list[str] = []
    second = train(
        spec,
        name="shared",
        search=[folder],
        observer=lambda status: said.extend(item["text"] for item in status["messages"]),
    )
    thread.join()
    assert first == [second]
    assert (second.status, second.digest) == ("done", straight.digest)
    assert said[0].startswith("the run is alive (process")
    assert len(read_past(Storage.at(second.run)).attempts) == 1


def test_a_second_submit_that_asks_for_more_extends_the_live_run_when_it_is_done(
    make_spec: MakeSpec, folder: Path, tmp_path: Path, wait_until: WaitUntil
) -> None:
    gate = tmp_path / "gate"
    gate.mkdir()
    fields = {"mode": "local", "args": {"pause_s": 0.2, "gate": str(gate)}}
    first: list[Outcome] = []
    thread = threading.Thread(
        target=lambda: first.append(train(make_spec(**fields), name="live", search=[folder]))
    )
    thread.start()
    wait_until(lambda: os.listdir(gate), 90, "the first step")
    (gate / "fast").touch()
    longer = make_spec(**fields, epochs=4)
    second = train(longer, name="live", search=[folder])
    thread.join()
    straight = train(longer, name="straight", search=[folder])
    assert (first[0].step, second.step) == (12, 16)
    assert (second.status, second.digest) == ("done", straight.digest)


DYING = '''
import math
import os
import signal
from pathlib import Path

import torch.distributed as dist
from tiny import Tiny

GATE = Path(__file__).parent / "gate"


def meets(what):
    """Whether this process is the one that the next file of this name is meant for."""
    for path in sorted(GATE.glob(f"{what}-*")):
        try:
            path.rename(GATE / f"met-{path.name}")
        except FileNotFoundError:
            continue
        return True
    return False


def dying(what, call):
    def die_or_call(*args, **options):
        if "RANK" in os.environ and meets(what):
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **options)

    return die_or_call


dist.init_process_group = dying("forms", dist.init_process_group)
dist.destroy_process_group = dying("ends", dist.destroy_process_group)


class Dying(Tiny):
    def before_step(self, model, step):
        super().before_step(model, step)
        if step == 5 and meets("raises"):
            (GATE / "forms-2").touch()
            raise ValueError("once")
'''


def test_a_worker_may_die_while_its_group_forms_and_while_it_is_taken_apart(
    make_spec: MakeSpec, folder: Path, tmp_path: Path, straight: Outcome
) -> None:
    (tmp_path / "dying.py").write_text(DYING)
    gate = tmp_path / "gate"
    gate.mkdir()
    for name in ("forms-1", "raises-1", "ends-1"):
        (gate / name).touch()
    spec = make_spec(mode="ddp", workers=2, workload="dying:Dying", faults={"spares": 1})
    outcome = train(spec, name="dying", search=[tmp_path, folder])
    met = {path.name for path in gate.iterdir()}
    assert met == {"met-forms-1", "met-raises-1", "met-ends-1", "met-forms-2"}
    assert (outcome.status, outcome.digest) == ("done", straight.digest)
    found = summarize(Storage.at(outcome.run))
    # Those who hold the state may be the two that die one after the other: a snapshot is left.
    assert found.num_redone <= 5
    kinds = [str(incident.kind) for incident in found.incidents]
    assert (kinds.count("exception"), kinds.count("crash")) == (1, 3)
