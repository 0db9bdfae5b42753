from __future__ import annotations

import posixpath
import re
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.telemetry.records import StepRecord
from samestep.telemetry.tracking_names import (
    MAX_NAME,
    MAX_PARAM,
    batches,
    cut,
    flatten,
    step_metrics,
    tracked_name,
    tracked_params,
)

NAMES = st.one_of(st.text(max_size=20), st.text(alphabet="./:a", max_size=12))
RECORD = StepRecord(
    step=3,
    epoch=0,
    samples=8,
    loss=0.5,
    shard_losses=[0.5],
    shard_weights=[8.0],
    grad_norm=None,
    lr=[0.1],
    ids="",
)


@given(NAMES)
def test_a_tracked_name_is_one_that_mlflow_takes(name: str) -> None:
    tracked = tracked_name(name)
    assert re.fullmatch(r"[A-Za-z0-9_\-.: /]+", tracked)
    assert posixpath.normpath(tracked) == tracked
    assert tracked != "."
    assert not tracked.startswith(("..", "/"))
    assert len(tracked) <= MAX_NAME


@given(NAMES, NAMES)
def test_two_names_never_meet(a: str, b: str) -> None:
    assert (tracked_name(a) == tracked_name(b)) == (a == b)


@pytest.mark.parametrize(
    ("name", "tracked"),
    [
        ("accuracy", "accuracy"),
        ("top-5 acc_1.x/y", "top-5 acc_1.x/y"),
        ("a+b", "a:2b:b"),
        ("a:2b:b", "a:3a:2b:3a:b"),
        ("größe", "gr:f6::df:e"),
        ("a//b", "a/:2f:b"),
        ("../a", ":2e:./a"),
        ("", "::"),
    ],
)
def test_odd_characters_become_their_code_points(name: str, tracked: str) -> None:
    assert tracked_name(name) == tracked


def test_long_names_that_differ_late_stay_apart() -> None:
    a, b = tracked_name("x" * 400 + "a"), tracked_name("x" * 400 + "b")
    assert a != b
    assert len(a) == len(b) == MAX_NAME


def test_a_long_parameter_is_cut_marked_and_told_from_one_that_differs_at_its_end() -> None:
    params = tracked_params({"x": "a" * 20_000, "y": "a" * 19_999 + "b", "z": "short"})
    assert params["z"] == "short"
    assert params["x"] != params["y"]
    assert len(params["x"]) == MAX_PARAM
    assert "cut: 20000 characters" in params["x"]
    assert cut("a" * MAX_PARAM, MAX_PARAM) == "a" * MAX_PARAM


def test_nested_fields_become_paths_and_values_json() -> None:
    data = {"a": {"b": 1, "c": {}}, "d": None, "e": "text", "f": [1, True], "g": False}
    assert flatten(data) == {
        "a.b": "1",
        "a.c": "{}",
        "d": "null",
        "e": "text",
        "f": "[1, true]",
        "g": "false",
    }


def test_keys_with_dots_do_not_meet_nested_ones() -> None:
    data = {"args": {"layers": {"a.b": 1, 'a."b': 3, "a": {"b": 2, '"b': 4}}}}
    flat = flatten(data)
    assert sorted(flat.values()) == ["1", "2", "3", "4"]
    assert flat['args.layers."a.b"'] == "1"
    assert len(tracked_params(flat)) == 4


def test_a_step_has_points_for_what_it_has_only() -> None:
    assert dict(step_metrics(RECORD)) == {"loss": 0.5, "lr": 0.1}
    full = replace(RECORD, grad_norm=2.0, lr=[0.1, 0.2], skipped=True, metrics={"loss": 3.0})
    assert dict(step_metrics(full)) == {
        "loss": 0.5,
        "grad_norm": 2.0,
        "lr": 0.1,
        "lr/group_1": 0.2,
        "skipped": 1.0,
        "train/loss": 3.0,
    }


def test_batches_hold_everything_once() -> None:
    assert [list(part) for part in batches(range(7), 3)] == [[0, 1, 2], [3, 4, 5], [6]]
    assert list(batches([], 3)) == []
