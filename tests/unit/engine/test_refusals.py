"""What can't be exact or breaks the interface is refused, and says what it is and what to do."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pool import Pool, gathered, spec_of

from samestep.checkpoint.storage import Storage
from samestep.telemetry.past import read_past

Failures = Callable[..., list[tuple[str, str]]]
Results = Callable[..., list[dict[str, Any]]]

BEFORE_STEP_0 = {
    "sparse module": ("NotExactError", r"module  makes sparse gradients: build it with sparse=Fal"),
    "sparse": ("NotExactError", r"gradient of 0\.weight is sparse .*: make it dense"),
    "reentrant": ("NotExactError", r"2\.\w+ got its gradient in several parts.*use_reentrant=Fal"),
    "backward": ("NotExactError", r"must return the loss, not call backward\(\)"),
    "create graph": ("NotExactError", r"must return the loss, not call backward\(\)"),
    "replaced": ("NotExactError", r"gradient of .* was replaced during backward"),
    "step in a hook": ("NotExactError", r"0\.weight has a post-accumulate-grad hook.*step in the"),
    "update in a hook": ("NotExactError", r"parameters changed during forward or backward"),
    "lbfgs": ("NotExactError", r"LBFGS needs a closure.*\(SGD, Adam, AdamW, \.\.\.\)"),
    "sync": ("NotExactError", r"module 1 is SyncBatchNorm.*use BatchNorm"),
    "expanded": ("NotExactError", r"weight is not dense \(shape \(1, 6\), strides \(1, 0\)\)"),
    "nondeterministic": ("NotExactError", r"without a deterministic kernel: max_unpooling2d"),
    "vector": ("WorkloadError", r"must return a scalar \(0 dim.*got shape \(3, 1\).*take the mean"),
    "detached": ("WorkloadError", r"not attached to the graph \(step 0, shard 0\)"),
    "number": ("WorkloadError", r"Odd\.loss must return a scalar tensor or .*Loss, got float"),
    "integer": ("WorkloadError", r"of a floating dtype, got shape \(\) of torch\.int64"),
    "negative weight": ("WorkloadError", r"returned the weight -1\.0 .*must be >= 0"),
    "buffer grows": ("WorkloadError", r"buffer cache became \(2,\) of torch\.float32 in forward"),
    "misspelt": ("WorkloadError", r"dimensions of 'targets', which.*did you mean 'target'\?"),
    "lazy": ("WorkloadError", r"0\.weight, 0\.bias, 2\.weight, 2\.bias of Sequential have no sh"),
    "no model": ("WorkloadError", r"model\(\) must return a Module, got _NotAModel"),
    "no optimizer": ("WorkloadError", r"optimizer\(\) must return a Optimizer, got str"),
    "order": ("WorkloadError", r"order\(0\) holds the index 99; allowed are 0 to 36"),
    "order of floats": ("WorkloadError", r"order\(0\) must give a flat sequence of integers"),
    "order raises": ("UserCodeError", r"Odd\.order\(0\) raised LookupError: .*no order"),
}
METRICS = {
    "matrix metric": r"metric 'm' must be .* per sample, got shape \(2, 2\) of torch\.float32$",
    "column metric": r"metric 'm' must be .* per sample, got shape \(3, 1\) of torch\.float32$",
    "complex metric": r"metric 'm' must be .* per sample, got shape \(3,\) of torch\.complex64$",
    "metric of none": r"metric 'm' must be a number or a 1-dim tensor with one value .*, got None$",
    "metric of text": r"metric 'm' must be a number or a 1-dim tensor with one .*, got '0\.5'$",
    "metric of a list": r"metric 'm' must be a number or a 1-dim .*, got \[0\.5, 0\.5\]$",
    "metric without name": r"metrics must be a dict from names to numbers or .*, got \{7: 0\.5\}$",
    "metrics of none": r"metrics must be a dict from names to numbers or 1-dim .*, got None$",
    "metrics in a list": r"metrics must be a dict from names to numbers or .*, got \[0\.5\]$",
}
IN_MID_RUN = {
    "other dtype": ("BadBatchError", r"step 2, shard 0 is of another kind.*0: torch\.float64 with"),
    "other rank": ("BadBatchError", r"step 2, shard 0 is of .* with 3 dimensions, the first .* 2 "),
    "other dimension": ("BadBatchError", r"1 has shape \(3, 2\), the workload declares \(None, 1"),
    "too large": ("BadBatchError", r"step 2, shard 0 breaks the declared range: 0 .* any to 100$"),
    "not a number": ("BadBatchError", r"step 2, shard 0 breaks the .* nan to nan, the workload"),
    "other array": ("BadBatchError", r"2: numpy\.int64 with 1 .* first batch had numpy\.int32"),
    "changes later": ("NotExactError", r"of step 2 changed parameters in place \(0\.weight\)"),
    "item raises": ("UserCodeError", r"reading sample 25 \(step 2, shard 1\) raised OSError: cann"),
    "freezes": ("WorkloadError", r"requires_grad .* changed during the forward of step 2, shard 0"),
    "order shrinks": ("WorkloadError", r"order\(1\) has 9 indices, order\(0\) had 10: there must"),
}


def odd(fault: str, size: int = 37, at: int = 2, **fields: Any) -> dict[str, Any]:
    return spec_of("odd:Odd", args={"fault": fault, "size": size, "at": at}, **fields)


@pytest.mark.parametrize("fault", BEFORE_STEP_0)
def test_it_is_refused_before_step_0(fault: str, failures: Failures) -> None:
    [found] = failures("engine", spec=odd(fault), num_steps=1)
    assert_told(found, BEFORE_STEP_0[fault])


@pytest.mark.parametrize("fault", IN_MID_RUN)
def test_it_is_refused_before_the_update_of_its_step(fault: str, failures: Failures) -> None:
    [found] = failures("engine", spec=odd(fault), num_steps=5)
    assert_told(found, IN_MID_RUN[fault])


@pytest.mark.parametrize("fault", METRICS)
def test_a_metric_that_is_no_number_is_refused_by_its_name_at_whatever_step_it_comes(
    fault: str, failures: Failures
) -> None:
    for at in (0, 2):
        spec = odd(fault, at=at)
        [found] = failures("engine", spec=spec, num_steps=4)
        assert_told(found, ("WorkloadError", METRICS[fault]))
        assert f"Odd.loss, step {at}, shard 0: " in found[1]


def assert_told(found: tuple[str, str], expected: tuple[str, str]) -> None:
    assert found[0] == expected[0], found[1]
    assert re.search(expected[1], found[1], re.DOTALL), found[1]


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_trainable_set_that_differs_between_workers_is_refused_on_all(
    failures: Failures, world_size: int
) -> None:
    found = failures("engine", world_size, spec=odd("freezing differs"), num_steps=4)
    # A slow worker may find the others gone before it has heard from all.
    assert {"WorkloadError"} <= {kind for kind, _ in found} <= {"WorkloadError", "PeerLostError"}
    for message in (message for kind, message in found if kind == "WorkloadError"):
        assert "parameters that require a gradient differ between workers at step 2" in message
        assert "before_step" in message


def test_samples_that_differ_between_workers_are_refused_on_all(failures: Failures) -> None:
    found = failures("engine", 2, spec=odd("order differs", size=2000), num_steps=2)
    for kind, message in found:
        assert kind == "DivergenceError"
        assert "the samples of worker 1 differs from worker 0's when the group formed" in message
    later = odd("order differs later", size=2000)
    for kind, message in failures("engine", 2, spec=later, num_steps=4):
        assert kind == "DivergenceError"
        assert "the samples of step 2 differ between workers: order() or the size of" in message


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("model differs", "the state of worker 1, 2 differs from worker 0's when the group formed"),
        ("layout differs", "the layout of worker 1 differs from worker 0's when the group formed"),
    ],
)
def test_a_model_that_differs_between_processes_is_refused_and_names_the_workers(
    fault: str, told: str, failures: Failures
) -> None:
    for kind, message in failures("engine", 3, spec=odd(fault), num_steps=1):
        assert kind == "DivergenceError"
        assert told in message


def test_a_state_that_no_checkpoint_can_hold_is_refused_before_step_0_with_its_path(
    results: Results, tmp_path: Path
) -> None:
    answers = results("attempt", 2, spec=odd("unkept"), run=str(tmp_path / "run"))
    verdict = answers[0]["verdict"]
    assert verdict["kind"] == "CheckpointError:2"
    assert "handles[1]: <object object" in verdict["message"]
    assert read_past(Storage.at(str(tmp_path / "run"))).num_steps == 0


def test_a_state_that_diverges_is_never_committed_and_names_the_odd_worker(
    results: Results, tmp_path: Path
) -> None:
    spec = odd("weights diverge", digest_every=1, checkpoint={"every_steps": 1})
    answers = results("attempt", 3, spec=spec, run=str(tmp_path / "run"))
    run = Storage.at(str(tmp_path / "run"))
    assert {answer["verdict"]["kind"] for answer in answers} == {"DivergenceError:1"}
    message = answers[0]["verdict"]["message"]
    assert "the state after 3 steps differs between workers; odd ones out: worker 1" in message
    assert run.list("checkpoints") == ["step-00000001", "step-00000002"]
    incidents = [
        json.loads(run.read(f"incidents/{i}/incident.json")) for i in run.list("incidents")
    ]
    assert {incident["kind"] for incident in incidents} == {"divergence"}
    assert read_past(run).num_steps == 2


def test_a_first_shard_without_weight_asks_for_nominal_weight(
    results: Results, tmp_path: Path
) -> None:
    spec = odd("first weight 0")
    [answer] = results("attempt", 1, spec=spec, run=str(tmp_path / "run"))
    assert answer["verdict"]["kind"] == "RunConflictError:2"
    assert "set nominal_weight in the job file" in answer["verdict"]["message"]


@pytest.mark.parametrize("fault", ["raises", "raises in backward"])
def test_an_exception_in_one_worker_is_told_by_it_and_frees_the_others_at_once(
    pool: Pool, fault: str
) -> None:
    started = time.monotonic()
    answers = gathered(pool, "engine", 3, spec=odd(fault), num_steps=4)
    assert time.monotonic() - started < 20
    kinds = [value[0] for _, value in answers]
    assert kinds == ["PeerLostError", "UserCodeError", "PeerLostError"]
    assert "KeyError: 'mine alone'" in answers[1][1][1]
    if fault == "raises":
        assert "worker 1 failed at step 2" in answers[0][1][1]


def test_an_attempt_lets_go_of_the_group_when_backward_raised_in_one_worker(
    results: Results, tmp_path: Path
) -> None:
    started = time.monotonic()
    spec = odd("raises in backward")
    answers = results("attempt", 3, spec=spec, run=str(tmp_path / "run"))
    assert time.monotonic() - started < 20
    assert {answer["verdict"]["kind"] for answer in answers} == {"UserCodeError:1"}
    assert [answer["planned"] for answer in answers] == [False] * 3
