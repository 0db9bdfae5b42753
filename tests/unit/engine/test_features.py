"""Each training feature: the same bits in every place, and over a stop and resume at every step."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attempts import PLACES, Run, Train, everywhere
from feature_cases import Scored
from pool import spec_of

from samestep import load_weights
from samestep.checkpoint.committed import list_checkpoints
from samestep.telemetry.past import read_past
from samestep.telemetry.records import StepRecord

Results = Callable[..., list[dict[str, Any]]]
NUM_STEPS = 6
OWN = {
    "optimizer",
    "scores",
    "schedule",
    "name",
    "metric",
    "without",
    "kind",
    "seen",
    "raises_at",
    "lazily",
}
FALLING = [3, 2, 4, 1, 0, 2]
FP16 = {"init_scale": 8.0, "growth_interval": 2}


def feature(workload: str = "Scored", **fields: Any) -> dict[str, Any]:
    """A spec for a workload of feature_cases.py; two steps an epoch, six in all."""
    args = {key: value for key, value in fields.items() if key in OWN}
    rest = {key: value for key, value in fields.items() if key not in OWN}
    return spec_of(f"feature_cases:{workload}", args=args, **{"max_steps": NUM_STEPS, **rest})


PLATEAU = feature(schedule="plateau", scores=FALLING, evaluate={"every_steps": 1})
EARLY = feature(
    scores=[1, 2, 5, 5, 4, 5.4, 5.6, 9],
    max_steps=9,
    evaluate={"every_steps": 1, "every_epochs": 0},
    early_stop={"metric": "score", "order": "max", "patience": 3, "min_delta": 0.5},
)
TOGETHER = feature(
    "Together", optimizer="fused", clip_norm=0.1, precision="bf16", ema={"decay": 0.7}
)
CASES: dict[str, dict[str, Any]] = {
    "by step": feature(schedule="step"),
    "by epoch": feature(schedule="epoch"),
    "by evaluation": feature(schedule="evaluation", evaluate={"every_epochs": 0, "every_steps": 3}),
    "every second epoch": feature(schedule="evaluation", evaluate={"every_epochs": 2}, max_steps=9),
    "plateau": PLATEAU,
    "plateau of a real metric": feature(
        schedule="plateau", name="error", evaluate={"every_steps": 2}
    ),
    "ema": feature(ema={"decay": 0.7}, optimizer="fused"),
    "ema, fp16": feature("Halved", ema={"decay": 0.7}, precision="fp16", scaler=FP16),
    "groups": feature("Grouped", ema={"decay": 0.5}, schedule="epoch"),
    "early stop": EARLY,
    "together": TOGETHER,
}


@pytest.mark.parametrize("case", CASES)
def test_a_feature_gives_the_same_bits_in_every_place_and_over_a_stop_at_every_step(
    case: str, train: Train
) -> None:
    spec = CASES[case]
    straight = everywhere(train, spec)[0]
    for stop in range(1, len(straight.steps())):
        first = train({**spec, "max_steps": stop}, f"stopped-{stop}", **PLACES[stop % 4])
        assert len(first.steps()) == stop
        resumed = train(spec, f"stopped-{stop}", **PLACES[(stop + 1) % 4])
        assert resumed.digest == straight.digest, f"stopped after {stop} steps"
        assert list(map(told, resumed.steps())) == list(map(told, straight.steps()))
        assert resumed.result["message"] == straight.result["message"]


def told(step: StepRecord) -> str:
    """What the ledger has of a step, but for how long it took."""
    return repr((step.step, step.lr, step.loss, step.grad_norm, step.metrics, step.ids))


@pytest.mark.parametrize(
    ("case", "rates"),
    [
        ("by step", [1, 1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32]),
        ("by epoch", [1, 1, 1 / 2, 1 / 2, 1 / 4, 1 / 4]),
        ("by evaluation", [1, 1, 1, 1 / 2, 1 / 2, 1 / 2]),
        ("every second epoch", [1] * 4 + [1 / 2] * 4 + [1 / 4]),
        ("plateau", [1, 1, 1 / 2, 1 / 2, 1 / 4, 1 / 8]),
    ],
)
def test_a_schedule_is_stepped_when_it_says(case: str, rates: list[float], train: Train) -> None:
    steps = train(CASES[case], "run").steps()
    assert [step.lr for step in steps] == [[0.05 * rate] for rate in rates]


def test_the_case_with_everything_together_has_all_of_it_in_force(train: Train) -> None:
    run = train(TOGETHER, "run", 2)
    clip_norm = TOGETHER["clip_norm"]
    assert all(step.grad_norm > clip_norm for step in run.steps())
    cosine = [0.05 * (1 + math.cos(math.pi * step / 8)) / 2 for step in range(NUM_STEPS)]
    assert [step.lr for step in run.steps()] == [[pytest.approx(rate)] for rate in cosine]
    for ema in (True, False):
        weights = load_weights(run.folder, ema=ema)
        assert torch.equal(weights["3.weight"], weights["5.weight"])
        assert weights["3.weight"].is_contiguous(memory_format=torch.channels_last)
    averages = load_weights(run.folder)
    assert not torch.equal(averages["3.weight"], weights["3.weight"])
    assert train({**TOGETHER, "precision": "fp32"}, "fp32").digest != run.digest


def test_a_run_goes_on_as_if_nothing_was_when_it_fails_between_evaluations_and_checkpoints(
    train: Train, tmp_path: Path
) -> None:
    seen = tmp_path / "seen"
    seen.mkdir()
    fields = {**PLATEAU["args"], "seen": str(seen)}
    straight = train({**PLATEAU, "workload": "feature_cases:Hooked", "args": fields}, "straight")
    spec = {**PLATEAU, "workload": "feature_cases:Hooked", "checkpoint": {"every_steps": 3}}
    broken = train({**spec, "args": {**fields, "raises_at": "on_step 4"}}, "other", 2)
    assert broken.result is None
    # The same job without the hook that raised: its args are part of what the bits depend on.
    rewrite(tmp_path / "other" / "spec.yaml", "raises_at: on_step 4", "raises_at: ''")
    resumed = train({**spec, "args": {**fields, "raises_at": ""}}, "other", 3)
    assert resumed.digest == straight.digest
    assert read_past(resumed.storage).num_redone == 2
    assert len(resumed.evaluations()) == len(straight.evaluations()) == NUM_STEPS
    assert resumed.evaluations() == straight.evaluations()


def rewrite(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert old in text
    path.write_text(text.replace(old, new), encoding="utf-8")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"schedule": "bare plateau"},
            "ReduceLROnPlateau.step takes a metric, so it must be stepped on an evaluation; got "
            "every='step', metric=None",
        ),
        (
            {"schedule": "plateau", "name": "accuracy"},
            "the schedule's metric is 'accuracy', but evaluate() gives error, score",
        ),
        (
            {"schedule": "plateau", "without": True},
            "ReduceLROnPlateau is stepped on evaluations, but evaluation_data() returns None",
        ),
        (
            {"schedule": "evaluation", "evaluate": {"every_epochs": 0}},
            "ExponentialLR is stepped on evaluations, but evaluate.every_epochs and "
            "evaluate.every_steps are 0",
        ),
        ({"schedule": "batch"}, "allowed are 'step', 'epoch', 'evaluation'"),
        (
            {"checkpoint": {"best": {"metric": "scores"}}},
            "checkpoint.best.metric is 'scores', but evaluate() gives error, score; did you mean "
            "score?",
        ),
        (
            {"early_stop": {"metric": "loss"}},
            "early_stop.metric is 'loss', but evaluate() gives error, score",
        ),
        (
            {"early_stop": {"metric": "score"}, "without": True},
            "early_stop.metric is 'score', but evaluation_data() returns None",
        ),
        ({"metric": "matrix"}, "metric 'score' must be a number or a 1-dim tensor with one value"),
        ({"metric": "none"}, "one value per sample, got None"),
        ({"metric": "text"}, "one value per sample, got '0.5'"),
        ({"metric": "complex"}, "one value per sample, got shape (3,) of torch.complex64"),
        ({"metric": "no dict"}, "metrics must be a dict from names to numbers"),
    ],
)
def test_what_no_evaluation_can_answer_is_refused_before_the_first_step(
    fields: dict[str, Any], message: str, train: Train
) -> None:
    run = train(feature(**fields), "run", 2)
    assert message in run.verdict["message"]
    assert run.verdict["kind"] == "WorkloadError:2"
    assert run.steps() == []


def test_the_averages_are_those_of_the_weights_after_each_applied_update(
    train: Train, tmp_path: Path
) -> None:
    spec = feature(
        "Halved",
        ema={"decay": 0.7},
        precision="fp16",
        scaler=FP16,
        checkpoint={"every_steps": 1, "keep": 9},
    )
    run = train(spec, "run", 2)
    skipped = [step.step for step in run.steps() if step.skipped]
    assert 3 in skipped
    folders = {info.step: info.uri for info in list_checkpoints(run.storage)}
    assert sorted(folders) == [1, 2, 3, 4, 5, 6]
    before = load_weights(folders[1], ema=True)
    for step in range(1, NUM_STEPS):
        weights = load_weights(folders[step + 1], ema=False)
        after = load_weights(folders[step + 1])
        for key in ("1.weight", "4.weight", "4.bias"):
            expected = before[key]
            if step not in skipped:
                expected = torch.lerp(before[key], weights[key], 1 - 0.7)
            assert torch.equal(after[key], expected), f"{key} after step {step}"
        assert torch.equal(after["2.running_mean"], weights["2.running_mean"])
        before = after


def test_evaluation_sees_the_averages_and_leaves_the_weights_alone(train: Train) -> None:
    spec = feature(ema={"decay": 0.9})
    run = train(spec, "averaged", 2)
    plain = train(feature(), "plain", 2)
    for key, weights in load_weights(plain.folder).items():
        assert torch.equal(weights, load_weights(run.folder, ema=False)[key])
    model = Scored(size=20).model()
    model.load_state_dict(load_weights(run.folder))
    model.eval()
    rows = Scored(size=20).evaluation_data()
    assert rows is not None
    with torch.no_grad():
        error = [float((model(x[None]) - y).square()) for x, y in (rows[i] for i in range(7))]
    assert run.result["evaluation"]["error"] == pytest.approx(sum(error) / 7, rel=1e-5)
    assert run.result["evaluation"] != plain.result["evaluation"]


def test_early_stop_ends_a_run_as_done_and_says_why_and_more_patience_goes_on(
    train: Train,
) -> None:
    run = train(EARLY, "run", 2)
    assert run.result["status"] == "done"
    assert run.result["reason"] == "early_stop"
    assert run.result["step"] == 6
    assert run.result["message"] == (
        "early stop: score did not improve by more than 0.5 in 3 evaluations; the best was 5 "
        "after 3 steps"
    )
    more = {**EARLY, "early_stop": {**EARLY["early_stop"], "patience": 4}}
    longer = train(more, "run", 3)
    assert longer.result["reason"] == "end"
    assert longer.digest == train(more, "straight").digest


SCORES = [5.0, 1.0, 2.0, 3.0, 4.0, 0.0]
NAN = float("nan")


@pytest.mark.parametrize(
    ("scores", "best", "kept"),
    [
        (SCORES, 1, [1, 6]),
        ([NAN, *SCORES], 2, [2, 7]),
        ([5.0, 1.0, NAN, 6.0, 2.0], 4, [4, 5]),
        ([*SCORES, NAN], 1, [1, 7]),
        ([1.0, 1.0, 1.0], 1, [1, 3]),
        ([NAN, NAN, NAN], None, [3]),
    ],
)
def test_the_best_and_the_latest_checkpoint_both_stay_and_nan_is_never_best(
    scores: list[float], best: int | None, kept: list[int], train: Train
) -> None:
    spec = feature(
        scores=[str(score) for score in scores],
        max_steps=len(scores),
        evaluate={"every_steps": 1},
        checkpoint={"every_steps": 2, "keep": 1, "best": {"metric": "score"}},
    )
    run = train(spec, "run", 2)
    found = list_checkpoints(run.storage)
    assert [info.step for info in found] == kept
    score = scores[kept[0] - 1]
    assert found[0].evaluation["score"] == score or math.isnan(score)
    expected = {"step": best, "metric": "score", "score": score} if best else None
    assert run.result["best"] == expected
    for which, step in (("latest", kept[-1]), ("best", best or kept[-1])):
        weights = load_weights(run.folder, checkpoint=which)
        assert int(weights["0.num_steps"]) == step


def test_the_best_checkpoint_is_the_same_after_stops_at_every_step(train: Train) -> None:
    scores = [2, 5, 1, 7, 7, 3]
    best = {"every_steps": 4, "keep": 1, "best": {"metric": "score", "order": "max"}}
    spec = feature(scores=scores, evaluate={"every_steps": 1}, checkpoint=best)
    straight = train(spec, "straight")
    for stop in range(1, NUM_STEPS):
        train({**spec, "max_steps": stop}, f"run-{stop}", **PLACES[stop % 4])
        resumed = train(spec, f"run-{stop}", **PLACES[(stop + 1) % 4])
        assert resumed.digest == straight.digest
        assert [info.step for info in list_checkpoints(resumed.storage)] == [4, 6]
        assert resumed.result["best"] == {"step": 4, "metric": "score", "score": 7.0}
    lowest = {**best, "best": {"metric": "score", "order": "min"}}
    train({**spec, "checkpoint": lowest}, "lowest")
    assert [info.step for info in list_checkpoints(train(spec, "lowest").storage)] == [3, 6]


def test_a_run_starts_from_the_averages_of_another_in_every_place_and_resumes_without_it(
    train: Train, tmp_path: Path
) -> None:
    source = train(spec_of("feature_cases:Named", max_steps=3, ema={"decay": 0.5}), "source")
    spec = feature("Named", init_from=str(source.folder), max_steps=4)
    runs = [train(spec, f"run-{number}", **place) for number, place in enumerate(PLACES)]
    assert len({run.digest for run in runs}) == 1
    assert runs[0].digest != train(feature("Named", max_steps=4), "without").digest
    told = read_past(runs[0].storage).attempts[0].fields["init_from"]
    assert told["digest"] == source.digest
    assert (told["step"], told["ema"], told["missing"]) == (3, True, [])
    for stop in (1, 2, 3):
        train({**spec, "max_steps": stop}, f"again-{stop}", **PLACES[stop])
    source.folder.rename(tmp_path / "moved")
    for stop in (1, 2, 3):
        assert train(spec, f"again-{stop}", **PLACES[stop - 1]).digest == runs[0].digest


def test_weights_are_taken_as_they_are_from_a_checkpoint_in_another_dtype(train: Train) -> None:
    source = train(feature("Named", max_steps=2), "source")
    (info,) = list_checkpoints(source.storage)
    spec = feature(
        "Named", kind="half", init_from={"path": info.uri}, checkpoint={"keep": 9}, max_steps=1
    )
    run = train(spec, "run", 2)
    start = load_weights(run.folder, checkpoint=0)
    for key, weights in load_weights(source.folder).items():
        assert torch.equal(start[key], weights.bfloat16())


def test_weights_that_do_not_fit_are_all_named(train: Train) -> None:
    source = train(feature("Named", max_steps=1), "source")
    wider = train(feature("Named", kind="wider", init_from=str(source.folder)), "wider", 2)
    for line in (
        "0.weight: shape (9, 6) in the checkpoint, shape (11, 6) in the model",
        "0.bias: shape (9,) in the checkpoint, shape (11,) in the model",
        "2.weight: shape (1, 9) in the checkpoint, shape (1, 11) in the model",
    ):
        assert line in wider.verdict["message"]
    renamed = feature("Named", kind="renamed", init_from=str(source.folder))
    refused = train(renamed, "refused", 2).verdict["message"]
    for line in ("3.weight: in the model, not in the checkpoint", "2.weight: in the checkpoint"):
        assert line in refused
    assert "init_from.strict: false" in refused
    loose = {"path": str(source.folder), "strict": False}
    taken = train({**renamed, "init_from": loose}, "taken", 2)
    told = read_past(taken.storage).attempts[0].fields["init_from"]
    assert told["missing"] == ["3.weight", "3.bias"]
    assert told["unexpected"] == ["2.weight", "2.bias"]
    apart = train({**feature("Named", kind="apart"), "init_from": loose}, "apart")
    assert "no key of the model (a.weight, a.bias) is in the checkpoint" in apart.verdict["message"]
    nowhere = train(feature("Named", init_from="/no/such/run"), "nowhere")
    assert "/no/such/run is neither a checkpoint" in nowhere.verdict["message"]
    for run in (wider, apart, nowhere):
        assert run.verdict["kind"] == "CheckpointError:2"
        assert run.steps() == []


def test_hooks_see_the_same_reduced_values_on_every_worker(train: Train, tmp_path: Path) -> None:
    seen: list[list[dict[str, Any]]] = []
    digests = set()
    for number, place in enumerate(PLACES):
        folder = tmp_path / f"seen-{number}"
        folder.mkdir()
        run = train(feature("Hooked", seen=str(folder)), f"run-{number}", **place)
        digests.add(run.digest)
        assert len(list(folder.iterdir())) == place.get("world_size", 1)
        for path in folder.iterdir():
            text = path.read_text(encoding="utf-8")
            seen.append([json.loads(line) for line in text.splitlines()])
        records = run.steps()
        steps = [line for line in seen[-1] if line["hook"] == "on_step"]
        assert [line["number"] for line in steps] == list(range(NUM_STEPS))
        assert [line["loss"] for line in steps] == [record.loss for record in records]
        assert [line["grad_norm"] for line in steps] == [r.grad_norm for r in records]
        assert [line["evaluation"] for line in steps] == [None] * NUM_STEPS
        epochs = [line for line in seen[-1] if line["hook"] == "on_epoch"]
        assert [(line["number"], line["step"]) for line in epochs] == [(0, 1), (1, 3), (2, 5)]
        assert epochs[-1]["evaluation"] == run.result["evaluation"]
    assert all(lines == seen[0] for lines in seen)
    assert len(digests) == 1
    assert digests == {train(feature(), "without").digest}


@pytest.mark.parametrize(
    ("raises_at", "where"),
    [
        ("on_step 2", "Hooked.on_step after step 2 raised ValueError: no such thing"),
        ("on_epoch 1", "Hooked.on_epoch after epoch 1, step 3 raised ValueError: no such thing"),
    ],
)
def test_a_hook_that_raises_ends_the_run_and_says_whose_it_was_and_where(
    raises_at: str, where: str, train: Train, tmp_path: Path
) -> None:
    run = train(feature("Hooked", seen=str(tmp_path), raises_at=raises_at), "run", 2)
    assert run.verdict["kind"] == "UserCodeError:1"
    assert where in run.verdict["message"]


@pytest.mark.parametrize(
    ("lazily", "what"),
    [(False, "Unopened.data()"), (True, "reading sample")],
)
def test_data_that_one_worker_can_not_open_says_which_worker_and_where(
    lazily: bool, what: str, results: Results, tmp_path: Path
) -> None:
    spec = feature("Unopened", lazily=lazily)
    answers = results("attempt", 3, spec=spec, run=str(tmp_path / "run"))
    run = Run(tmp_path / "run", answers)
    message = run.verdict["message"]
    assert message.startswith("worker 2 on ")
    assert what in message
    assert "raised FileNotFoundError" in message
    assert "/no/such/" in message
    files = list((tmp_path / "run" / "incidents").glob("*/incident.json"))
    told = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    assert 2 in [incident["world_rank"] for incident in told]
    assert all(incident["host"] for incident in told)
