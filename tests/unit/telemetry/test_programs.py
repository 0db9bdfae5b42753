from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from samestep.telemetry.programs import program

OWN = Path(sys.executable).with_name("samestep")


def test_the_bare_name_where_path_leads_to_this_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PATH", str(OWN.parent))
    assert program("samestep") == "samestep"


def test_the_path_from_here_where_it_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.devnull)
    monkeypatch.chdir(OWN.parent.parent)
    assert program("samestep") == f"{OWN.parent.name}/samestep"


def test_the_whole_path_from_elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", os.devnull)
    monkeypatch.chdir(tmp_path)
    assert program("samestep") == str(OWN)


def test_a_program_that_this_environment_lacks_is_called_by_name() -> None:
    assert program("no-such-program") == "no-such-program"
