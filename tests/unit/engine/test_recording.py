"""Records of an attempt, on every worker, until the ledger has them: however many those are."""

from __future__ import annotations

from pathlib import Path

import pytest

from samestep.checkpoint.state import State
from samestep.checkpoint.storage import Storage
from samestep.engine import survivor
from samestep.engine.peers import Peers
from samestep.engine.recording import Recording
from samestep.engine.resume import SETTLED, Resumption
from samestep.engine.survivor import HELD_KEY, Held
from samestep.spec import dump_spec, parse_spec
from samestep.telemetry.ledger import read_ledger
from samestep.telemetry.link import InProcess
from samestep.telemetry.record_queue import IN_MEMORY
from samestep.telemetry.recorder import Recorder
from samestep.telemetry.records import StepRecord

NUM_STEPS = IN_MEMORY + 50


def make_step(step: int) -> StepRecord:
    return StepRecord(
        step=step, epoch=0, samples=8, loss=1.0 / (step + 3), shard_losses=[0.1 * step],
        shard_weights=[8.0], grad_norm=0.5, lr=[0.1], ids=f"{step:032x}",
    )  # fmt: skip


@pytest.fixture
def recording() -> Recording:
    """Of a worker that does not send, after more steps than memory is meant to hold."""
    made = Recording(None, 1)
    for step in range(NUM_STEPS):
        made.step(make_step(step))
    return made


def test_a_worker_keeps_all_records_that_it_does_not_know_to_be_delivered(
    recording: Recording,
) -> None:
    assert recording.is_behind
    assert [record["step"] for record in recording.rest()] == list(range(NUM_STEPS))
    recording.note_delivered(NUM_STEPS - 20)
    assert not recording.is_behind
    assert [record["step"] for record in recording.rest()] == list(range(NUM_STEPS))[-20:]


def test_a_survivor_brings_them_into_the_ledger_each_once(
    recording: Recording, tmp_path: Path
) -> None:
    run = Storage.at(str(tmp_path / "run"))
    spec = parse_spec({"workload": "a:A", "batch_size": 8, "max_steps": 2 * NUM_STEPS})
    recorder = Recorder(run.uri, run="r", spec_yaml=dump_spec(spec), lease=False)
    recorder.begin_attempt({"start_step": 0, "mode": "local", "world_size": 1})
    recorder.push(1, "0", 1, [make_step(step).to_json() for step in range(5)])
    extras = {HELD_KEY: SETTLED.to_extras()}
    state = State(step=NUM_STEPS, tensors={}, values={"extras": extras})
    survivor.hold(
        Held(run_uri=run.uri, attempt=1, state=state, built=None, records=recording.rest())
    )
    try:
        status, target = recorder.status(), InProcess(recorder)
        Resumption(spec, run=run, peers=Peers(None), target=target, status=status).choose()
    finally:
        survivor.forget()
    logged = [line["step"] for line in read_ledger(run) if line["type"] == "step"]
    assert logged == list(range(NUM_STEPS))
