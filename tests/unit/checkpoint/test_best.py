"""Best and latest told apart, by what the manifests say."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from samestep import CheckpointError, InputError, load_weights
from samestep.checkpoint.committed import best_of, commit, list_checkpoints
from samestep.checkpoint.manifest import CheckpointMeta, Manifest
from samestep.checkpoint.ranking import Ranking
from samestep.checkpoint.reading import choose
from samestep.checkpoint.retention import apply_retention
from samestep.checkpoint.state import Parts, State, collect
from samestep.checkpoint.storage import Storage
from samestep.checkpoint.writing import write_files

HIGHEST = Ranking(metric="score", order="max")


@pytest.fixture
def run(tmp_path: Path) -> Storage:
    return Storage.at(str(tmp_path / "run"))


def state_of(step: int, *, ema: bool = False) -> State:
    model = torch.nn.Linear(2, 1).bfloat16()
    torch.nn.init.constant_(model.weight, step)
    averages = {name: torch.full(p.shape, step + 0.5) for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parts = Parts(model=model, optimizer=optimizer, ema=averages if ema else None)
    return collect(parts, step=step, extras={})


def save(
    run: Storage,
    step: int,
    score: float | None,
    ranking: Ranking | None = HIGHEST,
    *,
    ema: bool = False,
) -> Manifest:
    meta = CheckpointMeta(
        numerics={},
        spec={},
        created_s=0.0,
        evaluation={} if score is None else {"score": score},
        ranking=ranking,
    )
    manifest = write_files(run, state_of(step, ema=ema), meta)
    commit(run, manifest)
    return manifest


@pytest.mark.parametrize("score", [0.1 + 0.2, -0.0, math.inf, -math.inf, math.nan, None])
def test_the_manifest_keeps_scores_to_the_bit(run: Storage, score: float | None) -> None:
    manifest = save(run, 1, score)
    again = Manifest.from_json(manifest.to_json())
    assert repr(again) == repr(manifest)
    assert repr(list_checkpoints(run)[0].evaluation) == repr(manifest.meta.evaluation)


@pytest.mark.parametrize(
    ("scores", "order", "best"),
    [
        ([5, 1, 2, 3, 4, 0], "max", 1),
        ([5, 1, 2, 3, 4, 0], "min", 6),
        ([math.nan, 3, 4], "max", 3),
        ([3, math.nan, 2], "max", 1),
        ([3, 4, math.nan], "max", 2),
        ([None, 2, 2, None], "max", 2),
        ([-math.inf, math.nan], "max", 1),
        ([math.inf, 1], "min", 2),
    ],
)
def test_retention_keeps_the_best_beside_the_newest(
    run: Storage, scores: list[float | None], order: str, best: int
) -> None:
    ranking = Ranking(metric="score", order="max" if order == "max" else "min")
    for step, score in enumerate(scores, start=1):
        save(run, step, score, ranking)
        apply_retention(run, keep=1)
    assert [info.step for info in list_checkpoints(run)] == sorted({best, len(scores)})
    found = best_of(list_checkpoints(run))
    assert found is not None
    assert found.step == best
    assert choose(run, "best").step == best
    assert choose(run, "latest").step == len(scores)
    assert float(load_weights(run.root, checkpoint="best")["weight"][0, 0]) == best


def test_all_nan_gives_the_latest_for_the_best_with_a_warning(
    run: Storage, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (1, 2):
        save(run, step, math.nan)
    choice = choose(run, "best")
    assert choice.step == 2
    assert choice.warning is not None
    assert "score was NaN, or never evaluated" in choice.warning
    assert float(load_weights(run.root, checkpoint="best")["weight"][0, 0]) == 2
    assert choice.warning in caplog.text


def test_the_ranking_of_the_newest_counts(run: Storage) -> None:
    save(run, 1, 1.0)
    save(run, 2, 9.0)
    save(run, 3, 5.0, Ranking(metric="score", order="min"))
    assert choose(run, "best").step == 1
    save(run, 4, 5.0, None)
    with pytest.raises(CheckpointError, match="ranks its checkpoints by nothing"):
        choose(run, "best")


def test_a_checkpoint_that_is_not_there_is_refused_with_those_that_are(run: Storage) -> None:
    with pytest.raises(CheckpointError, match="has no whole checkpoint"):
        choose(run)
    save(run, 2, 1.0)
    save(run, 4, 2.0)
    assert choose(run, "2").step == choose(run, 2).step == 2
    with pytest.raises(CheckpointError, match="no checkpoint after 3 steps; it has whole ones "):
        choose(run, 3)
    for which in ("first", "-1", ""):
        with pytest.raises(InputError, match="is latest, best or a number of steps; got"):
            choose(run, which)
    folder = list_checkpoints(run)[0].uri
    assert load_weights(folder, checkpoint=2).keys() == {"weight", "bias"}
    with pytest.raises(InputError, match=r"is a checkpoint itself \(after 2 steps\)"):
        load_weights(folder, checkpoint="best")


def test_weights_are_the_averages_where_there_are_any_unless_asked_otherwise(run: Storage) -> None:
    save(run, 1, None, ema=True)
    averages = load_weights(run.root)["weight"]
    assert averages.dtype == torch.bfloat16
    assert averages[0].tolist() == [1.5, 1.5]
    assert load_weights(run.root, ema=True)["weight"].equal(averages)
    assert load_weights(run.root, ema=False)["weight"][0].tolist() == [1.0, 1.0]
    save(run, 2, None)
    assert load_weights(run.root)["weight"][0].tolist() == [2.0, 2.0]
    with pytest.raises(CheckpointError, match="has no averages of weights"):
        load_weights(run.root, ema=True)
