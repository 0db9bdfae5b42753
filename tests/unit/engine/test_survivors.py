"""What a failure leaves in the processes is enough to go on, whoever is gone, wherever it was."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attempts import Run
from hypothesis import given
from hypothesis import strategies as st
from pool import spec_of

from samestep.engine.handover import chunks
from samestep.engine.offers import Offer, Source, choose

Results = Callable[..., list[Any]]
WHERE = ["before_step", "loss", "backward", "on_step", "evaluate", "on_epoch"]


def spec(tmp_path: Path, where: str, **fields: Any) -> dict[str, Any]:
    args = {"where": where, "at": 5, "marker": str(tmp_path / "marker"), **fields}
    return spec_of(
        "breaking:Breaking",
        args=args,
        max_steps=12,
        batch_size=12,
        evaluate={"every_steps": 3},
        checkpoint={"every_steps": 2},
        digest_every=2,
        early_stop={"metric": "error", "order": "min", "patience": 100},
    )


@pytest.fixture(scope="module")
def straight(pool_of_session: Any, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("straight")
    task = {"spec": spec(folder, "nowhere"), "run": str(folder / "run"), "world_size": 1}
    where = pool_of_session.fresh_path()
    [(kind, answer)] = pool_of_session.run([("attempt", {**task, "where": where})])
    assert kind == "done"
    return Run(folder / "run", [answer])


@pytest.mark.parametrize(("where", "lost"), list(itertools.product(WHERE, [None, 0, 1])))
def test_a_broken_attempt_goes_on_from_what_is_held_and_redoes_no_step(
    results: Results, tmp_path: Path, straight: Run, where: str, lost: int | None
) -> None:
    folder = tmp_path / "run"
    broken = spec(tmp_path, where, rank=1 if where in ("loss", "backward") else None)
    # So far back that a resume from it would show.
    broken["checkpoint"] = {"every_steps": 100}
    answers = results("broken_attempts", 3, spec=broken, run=str(folder), lost=[lost])
    run = Run(folder, answers)
    assert answers[0]["redone"] == 0
    assert [failed[0] for failed in answers[0]["failed"]] == [False]
    assert len(run.steps()) == 12
    assert run.steps() == [
        step.__class__(**{**vars(step), **_own(mine)})
        for step, mine in zip(straight.steps(), run.steps(), strict=True)
    ]
    assert run.evaluations() == straight.evaluations()
    assert run.digest == straight.digest


def test_an_update_that_broke_off_is_held_by_nobody_and_is_taken_again_from_a_checkpoint(
    results: Results, tmp_path: Path, straight: Run
) -> None:
    folder = tmp_path / "run"
    broken = spec(tmp_path, "optimizer")
    answers = results("broken_attempts", 2, spec=broken, run=str(folder), lost=[None])
    run = Run(folder, answers)
    assert answers[0]["redone"] == 1  # it was at step 5, and the checkpoint is of 4 steps
    assert run.digest == straight.digest


def _own(step: Any) -> dict[str, Any]:
    return {"timing": step.timing, "attempt": step.attempt, "time": step.time,
            "state_digest": step.state_digest}  # fmt: skip


OFFERS = st.builds(
    Offer,
    kind=st.sampled_from(list(Source)),
    step=st.integers(0, 3),
    stage=st.integers(0, 4),
)


@given(offers=st.lists(st.lists(OFFERS, max_size=3), min_size=1, max_size=4))
def test_the_newest_state_is_chosen_whoever_offers_it(offers: list[list[Offer]]) -> None:
    choice = choose(offers)
    everything = list(itertools.chain(*offers))
    if not everything:
        assert choice.offer is None
        return
    assert choice.offer is not None
    newest = max((offer.step, offer.stage) for offer in everything)
    assert (choice.offer.step, choice.offer.stage) == newest
    kinds = [offer.kind for offer in everything if (offer.step, offer.stage) == newest]
    assert choice.offer.kind == min(kinds, key=list(Source).index)
    for rank, mine in enumerate(offers):
        holds = any((*newest, choice.offer.kind) == (o.step, o.stage, o.kind) for o in mine)
        assert (rank in choice.holders) == holds


@given(sizes=st.lists(st.integers(0, 20), max_size=8), size=st.integers(1, 9))
def test_chunks_hold_every_byte_once_in_order(sizes: list[int], size: int) -> None:
    views = [torch.arange(n, dtype=torch.uint8) + 10 * place for place, n in enumerate(sizes)]
    found = list(chunks(views, size))
    assert all(0 < sum(map(len, chunk)) <= size for chunk in found)
    assert all(sum(map(len, chunk)) == size for chunk in found[:-1])
    flat = [piece for chunk in found for piece in chunk]
    whole = torch.cat(views) if views else torch.empty(0)
    assert torch.cat(flat).tolist() == whole.tolist() if flat else not len(whole)
