from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from samestep.checkpoint.storage import Storage
from samestep.cli.main import app
from samestep.incidents.record import Incident, write
from samestep.names import IncidentKind

MakeRun = Callable[..., Storage]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "40")


def test_bundles_are_listed_shown_and_packed(whole_bundle: Storage, tmp_path: Path) -> None:
    folder, run = whole_bundle.root, str(Path(whole_bundle.root).parents[1])
    incident_id = Path(folder).name
    row = CliRunner().invoke(app, ["incidents", "list", run]).stdout.splitlines()[1]
    assert " 0.1 MB " in row
    show = ["incidents", "show", run, incident_id]
    shown = CliRunner().invoke(app, show).stdout
    assert f"bundle: {folder}" in shown
    assert "state after 2 steps (snapshot)" in shown
    assert "samples of 2 steps" in shown
    told = json.loads(CliRunner().invoke(app, [*show, "--json"]).stdout)
    assert told["bundle"]["sample_steps"] == [2, 3]
    packed = CliRunner().invoke(app, ["pack", run, incident_id, "--out", "one.zip"])
    assert packed.exit_code == 0, packed.output
    assert packed.stdout.startswith("one.zip: exception at step 3, ")
    assert CliRunner().invoke(app, ["pack", folder, "--out", "two.zip"]).exit_code == 0
    assert (tmp_path / "one.zip").read_bytes() == (tmp_path / "two.zip").read_bytes()
    again = CliRunner().invoke(app, ["pack", folder, "--out", "two.zip"])
    assert again.exit_code == 2
    assert "exists already" in again.stderr


def test_an_incident_without_a_bundle_is_told_and_those_that_have_one_are_named(
    make_run: MakeRun,
) -> None:
    run = make_run("a")
    written = write(run, Incident(kind=IncidentKind.CRASH, step=0, attempt=1, message="m"))
    assert "no bundle" in CliRunner().invoke(app, ["incidents", "show", "a", written.id]).stdout
    for arguments in (["a", written.id], ["a"]):
        result = CliRunner().invoke(app, ["pack", *arguments, "--out", "x.zip"])
        assert result.exit_code == 2
        assert "these do: none" in result.stderr
