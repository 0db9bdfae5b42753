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


def test_incidents_are_listed_whole_and_shown_one_by_one(make_run: MakeRun) -> None:
    run = make_run("a")
    written = write(
        run,
        Incident(
            kind=IncidentKind.HANG,
            step=3,
            attempt=1,
            world_rank=1,
            host="h",
            message="worker 1 made no progress\nand more",
            seen={"silent": []},
            traceback="in user_code",
            evidence=["logs/worker-1.log"],
        ),
    )
    listed = CliRunner().invoke(app, ["incidents", "list", "a"])
    assert listed.exit_code == 0
    row = listed.stdout.splitlines()[1]
    assert row.split()[:5] == [written.id, "hang", "3", "1", "1"]
    assert row.endswith("worker 1 made no progress")
    shown = CliRunner().invoke(app, ["incidents", "show", "a", written.id]).stdout
    assert "hang at step 3, attempt 1, worker 1 on h" in shown
    assert "and more" in shown
    assert "in user_code" in shown
    assert "evidence: logs/worker-1.log" in shown
    as_json = json.loads(CliRunner().invoke(app, ["incidents", "list", "a", "--json"]).stdout)
    assert [item["id"] for item in as_json] == [written.id]


def test_a_run_without_incidents_says_so_and_an_unknown_id_names_those_there_are(
    make_run: MakeRun,
) -> None:
    run = make_run("a")
    assert CliRunner().invoke(app, ["incidents", "list", "a"]).stdout.startswith("no incidents in ")
    write(run, Incident(kind=IncidentKind.CRASH, step=0, attempt=1, message="m"))
    result = CliRunner().invoke(app, ["incidents", "show", "a", "nothing"])
    assert result.exit_code == 2
    assert "has no incident 'nothing'; it has: crash-step-00000000-attempt-1" in result.stderr
