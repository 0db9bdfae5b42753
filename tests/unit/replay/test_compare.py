from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest

from samestep.checkpoint.storage import Storage
from samestep.errors import InputError, StorageError
from samestep.replay.compare import Verdict, compare_runs

MakeRun = Callable[..., Storage]


def test_equal_runs_are_identical_through_their_last_step(make_run: MakeRun) -> None:
    whole = {"evaluation": {6: 0.8}, "checkpoints": {3: 1.0, 6: 2.0}}
    found = compare_runs(make_run("a", **whole), make_run("b", **whole))
    assert found.verdict is Verdict.IDENTICAL
    assert (found.identical_through, found.num_compared) == (5, 6)
    assert (found.digest_step, found.evaluations_compared) == (6, 1)
    assert found.digest is not None
    assert len(found.digest) == 64
    assert found.first is None
    assert found.tolerance is None


def test_how_the_workers_were_spread_is_no_difference(make_run: MakeRun) -> None:
    found = compare_runs(make_run("a", workers=2), make_run("b", workers=1, mode="local"))
    assert found.verdict is Verdict.IDENTICAL
    assert found.spec == ()


def test_the_first_differing_step_and_quantity_are_told_with_both_values(
    make_run: MakeRun,
) -> None:
    above = math.nextafter(0.2, 1)
    found = compare_runs(make_run("a"), make_run("b", loss_at={2: above, 4: 9.0}))
    assert found.verdict is Verdict.DIFFERENT
    assert found.first is not None
    assert found.first.step == 2
    assert found.first.quantity == (
        "shard_losses[0]: 0x1.999999999999ap-3 (0.2) against 0x1.999999999999bp-3 (0.2)"
    )
    assert found.identical_through == 1


def test_runs_that_differ_from_the_first_step_on_are_identical_through_none(
    make_run: MakeRun,
) -> None:
    found = compare_runs(make_run("a"), make_run("b", seed=1))
    assert found.verdict is Verdict.DIFFERENT
    assert found.identical_through is None
    assert found.first is not None
    assert (found.first.step, found.first.quantity.partition(":")[0]) == (0, "ids")
    assert found.spec == ("seed: 0 against 1",)


def test_other_weights_behind_equal_losses_are_a_difference(make_run: MakeRun) -> None:
    found = compare_runs(
        make_run("a", checkpoints={3: 1.0, 6: 1.0}), make_run("b", checkpoints={3: 1.0, 6: 2.0})
    )
    assert found.verdict is Verdict.DIFFERENT
    assert found.first is not None
    assert found.first.step == 6
    assert found.first.quantity.startswith("checkpoint digest: ")
    assert found.digest is None


def test_another_evaluation_is_a_difference_before_the_step_that_follows(
    make_run: MakeRun,
) -> None:
    a = make_run("a", evaluation={3: 0.8})
    b = make_run("b", evaluation={3: 0.6}, loss_at={3: 7.0})
    found = compare_runs(a, b)
    assert found.first is not None
    assert found.first.step == 3
    assert found.first.quantity.startswith("evaluation, metrics.accuracy: ")
    assert found.identical_through == 2


def test_small_differences_under_other_numerics_are_within_tolerance(make_run: MakeRun) -> None:
    found = compare_runs(make_run("a"), make_run("b", shift=1e-5, torch_version="2.14"))
    assert found.verdict is Verdict.WITHIN_TOLERANCE
    assert found.numerics == ("torch: '2.13' against '2.14'",)
    assert found.first is not None
    assert found.first.step == 0
    assert found.tolerance == 1e-3


def test_large_differences_under_other_numerics_are_differences(make_run: MakeRun) -> None:
    found = compare_runs(make_run("a"), make_run("b", shift=0.1, torch_version="2.14"))
    assert found.verdict is Verdict.DIFFERENT


def test_small_differences_under_the_same_numerics_are_differences(make_run: MakeRun) -> None:
    found = compare_runs(make_run("a"), make_run("b", shift=1e-9))
    assert found.verdict is Verdict.DIFFERENT
    assert found.numerics == ()


def test_equal_bits_under_other_numerics_are_identical(make_run: MakeRun) -> None:
    found = compare_runs(make_run("a"), make_run("b", torch_version="2.14"))
    assert found.verdict is Verdict.IDENTICAL


def test_a_run_that_went_further_is_not_identical_unless_told_where_to_stop(
    make_run: MakeRun,
) -> None:
    a = make_run("a", num_steps=6, checkpoints={4: 1.0, 6: 5.0})
    b = make_run("b", num_steps=4, checkpoints={4: 1.0})
    found = compare_runs(a, b)
    assert found.verdict is Verdict.DIFFERENT
    assert (found.first, found.identical_through, found.only_in_a) == (None, 3, 2)
    found = compare_runs(a, b, through=3)
    assert found.verdict is Verdict.IDENTICAL
    assert (found.num_compared, found.digest_step) == (4, 4)


def test_runs_without_a_step_in_common_cannot_be_compared(make_run: MakeRun) -> None:
    with pytest.raises(InputError, match=r"a holds steps 0 to 5, .*b holds no step"):
        compare_runs(make_run("a"), make_run("b", num_steps=0))


def test_a_folder_that_is_no_run_cannot_be_compared(make_run: MakeRun, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="no run directory"):
        compare_runs(make_run("a"), Storage.at(str(tmp_path)))
