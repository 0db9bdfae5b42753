"""What differs around a replay is told, and only that."""

from __future__ import annotations

import platform
from pathlib import Path

from samestep.replay.surroundings import MAX_LINES, surroundings
from samestep.telemetry.provenance import packages


def test_the_same_surroundings_give_no_line(tmp_path: Path) -> None:
    same = {"python": platform.python_version(), "packages": packages()}
    assert surroundings(same, tmp_path) == []
    assert surroundings({}, tmp_path) == []


def test_what_differs_is_told_with_both_versions(tmp_path: Path) -> None:
    then = {**packages(), "torch": "1.0", "gone": "2.5"}
    told = surroundings(
        {"git_commit": "abc", "git_changed": "true", "python": "3.1", "packages": then}, tmp_path
    )
    assert told == [
        "code: abc with changes against no git revision",
        f"Python: 3.1 against {platform.python_version()}",
        "gone: 2.5 against none",
        f"torch: 1.0 against {packages()['torch']}",
    ]


def test_many_differences_are_cut_short(tmp_path: Path) -> None:
    then = {**packages(), **{f"gone-{n}": "1" for n in range(20)}}
    told = surroundings({"packages": then}, tmp_path)
    assert len(told) == MAX_LINES + 1
    assert told[-1] == "and 8 packages more"
