"""What is odd in a step is found before its update, alike everywhere, and dealt with as told."""

from __future__ import annotations

import math
from typing import Any

import torch
from attempts import PLACES, Run, Train, everywhere
from pool import spec_of

from samestep.checkpoint.reading import load_checkpoint
from samestep.checkpoint.state import State
from samestep.incidents.record import list_incidents
from samestep.names import IncidentKind

STEPS_PER_EPOCH = 4
NUM_STEPS = 10


def spec(policy: str = "stop", **fields: Any) -> dict[str, Any]:
    args = {key: fields.pop(key) for key in ("poison", "bursts_at", "idle") if key in fields}
    incidents = {"non_finite": policy, **fields.pop("incidents", {})}
    rest = {"max_steps": NUM_STEPS, "checkpoint": {"keep": 100, "every_steps": 1}, **fields}
    return spec_of("poisoned:Poisoned", args=args, incidents=incidents, **rest)


def last_state(run: Run) -> State:
    return load_checkpoint(run.storage, len(run.steps()))[0]


def is_finite(state: State) -> bool:
    floats = [t for t in state.tensors.values() if t.is_floating_point()]
    return all(bool(torch.isfinite(t).all()) for t in floats)


def odd_steps(run: Run) -> list[int]:
    return [incident.step for incident in list_incidents(run.storage)]


def test_a_run_stops_before_the_update_of_a_step_that_is_not_finite(train: Train) -> None:
    for number, place in enumerate(PLACES):
        run = train(spec(), f"run-{number}", **place)
        (incident,) = list_incidents(run.storage)
        assert incident.kind is IncidentKind.NON_FINITE
        assert incident.step < STEPS_PER_EPOCH
        assert incident.message == f"step {incident.step}: loss nan, grad_norm nan"
        assert incident.seen["policy"] == "stop"
        assert len(run.steps()) == incident.step
        assert run.verdict["kind"] == "IncidentError:1"
        assert run.verdict["message"] == (
            f"{incident.message}: incidents.non_finite is stop, so the run ends before the update "
            f"of step {incident.step}"
        )


def test_a_step_that_is_left_out_leaves_no_trace_but_its_place(train: Train) -> None:
    runs = everywhere(train, spec("skip", ema={"decay": 0.8}))
    for run in runs:
        skipped = [record.step for record in run.steps() if record.skipped]
        assert skipped == odd_steps(run)
        assert [step // STEPS_PER_EPOCH for step in skipped] == [0, 1, 2][: len(skipped)]
        assert len(skipped) >= 2
        assert is_finite(last_state(run))
        step = skipped[0]
        before = load_checkpoint(run.storage, step)[0] if step else None
        after = load_checkpoint(run.storage, step + 1)[0]
        if before is not None:
            assert before.tensors.keys() == after.tensors.keys()
            assert all(torch.equal(before.tensors[n], after.tensors[n]) for n in before.tensors)
        record = run.steps()[step]
        assert record.loss is not None
        assert math.isnan(record.loss)


def test_decisions_are_the_same_over_a_stop_and_resume_at_every_step(train: Train) -> None:
    # The sample that stands out is a spike of loss and gradient, found by what came before it.
    incidents = {"loss_spike": "skip", "grad_spike": "skip", "window": 6, "least": 4}
    odd = {"poison": 40.0, "incidents": {**incidents, "spike_score": 8.0}}
    straight = everywhere(train, spec("stop", **odd))[0]
    skipped = [record.skipped for record in straight.steps()]
    assert any(skipped)
    for stop in range(1, NUM_STEPS):
        train(spec("stop", **{**odd, "max_steps": stop}), f"stop-{stop}", **PLACES[stop % 4])
        resumed = train(spec("stop", **odd), f"stop-{stop}", **PLACES[(stop + 1) % 4])
        assert resumed.digest == straight.digest
        assert [record.skipped for record in resumed.steps()] == skipped
        assert odd_steps(resumed) == odd_steps(straight)


def test_continue_lets_it_pass_and_tells(train: Train) -> None:
    run = everywhere(train, spec("continue"))[0]
    assert len(run.steps()) == NUM_STEPS
    assert not any(record.skipped for record in run.steps())
    assert not is_finite(last_state(run))
    first = odd_steps(run)[0]
    assert odd_steps(run)[: NUM_STEPS - first] == list(range(first, NUM_STEPS))


def test_only_so_many_steps_are_left_out(train: Train) -> None:
    run = train(spec("skip", incidents={"max_skips": 1}), "run")
    assert run.verdict["message"].endswith(
        "1 steps were left out already, and incidents.max_skips is 1"
    )
    assert len(run.steps()) == odd_steps(run)[1]
    assert sum(record.skipped for record in run.steps()) == 1


def test_overflows_under_loss_scaling_are_no_incident(train: Train) -> None:
    fields = {"precision": "fp16", "scaler": {"init_scale": 1e38}, "poison": 1.0}
    run = everywhere(train, spec("stop", **fields))[0]
    assert run.steps()[0].skipped
    assert odd_steps(run) == []
    assert is_finite(last_state(run))


def test_a_weight_that_is_not_finite_is_named(train: Train) -> None:
    fields = {"bursts_at": 4, "poison": 1.0, "incidents": {"weights_every": 5}}
    run = train(spec("stop", **fields), "run", world_size=2)
    (incident,) = list_incidents(run.storage)
    assert incident.message == "after step 4: not finite: 3.bias"
    assert incident.seen["weights"] == ["3.bias"]
    assert len(run.steps()) == 5
    assert run.verdict["kind"] == "IncidentError:1"
    assert run.verdict["message"] == (
        f"{incident.message}: incidents.non_finite is stop, so the run ends here: the update of "
        "step 4 was applied"
    )
    assert not any(record.skipped for record in run.steps())


def test_skip_lets_weights_that_are_not_finite_pass_as_continue_does(train: Train) -> None:
    # A weight without effect: nothing else is ever found. What is skipped would end the run.
    fields = {"bursts_at": 4, "idle": True, "poison": 1.0}
    incidents = {"weights_every": 5, "max_skips": 0}
    digests = set()
    for policy in ("skip", "continue"):
        job = spec(policy, **fields, incidents=incidents)
        for number, place in enumerate(PLACES[:2]):
            run = train(job, f"{policy}-{number}", **place)
            digests.add(run.digest)
            found = list_incidents(run.storage)
            assert [incident.step for incident in found] == [4, 9]  # as often as it is looked for
            assert {incident.message for incident in found} == {
                f"after step {step}: not finite: idle" for step in (4, 9)
            }
            assert {incident.seen["policy"] for incident in found} == {policy}
            assert len(run.steps()) == NUM_STEPS
            assert not any(record.skipped for record in run.steps())
            assert not is_finite(last_state(run))
    # The state counts what was skipped: nothing was, under either.
    assert len(digests) == 1
