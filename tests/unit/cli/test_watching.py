"""`samestep watch` and `samestep ui`, and what they are made of."""

from __future__ import annotations

import io
import math
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from samestep.checkpoint.storage import Storage
from samestep.cli.chart import chart
from samestep.cli.main import app
from samestep.cli.watch import picture
from samestep.names import TimePart
from samestep.replay.watching import Curve, Watching
from samestep.telemetry import lease as leases
from samestep.telemetry.ledger import LedgerWriter
from samestep.telemetry.records import StepRecord
from samestep.telemetry.targets import announce

MakeRun = Callable[..., Storage]
Command = Callable[..., Result]
DONE = {"status": "done", "step": 6, "digest": "d" * 64}


@pytest.fixture
def samestep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    """Runs a command in a folder where `make_run` puts its runs under `runs/`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return lambda *arguments: CliRunner().invoke(app, list(arguments))


def shown(watching: Watching, now: float = 0.0) -> str:
    console = Console(width=90, record=True, file=io.StringIO())
    console.print(picture(watching, width=90, now=now))
    return console.export_text()


def step_record(step: int, time: float, loss: float | None = 0.5, **timing: float) -> StepRecord:
    return StepRecord(
        step=step,
        epoch=step // 4,
        samples=8,
        loss=loss,
        shard_losses=[loss],
        shard_weights=[8.0],
        grad_norm=1.0,
        lr=[0.1],
        ids="0",
        metrics={"accuracy": 0.25},
        timing=timing,
        time=time,
    )


def test_watch_shows_loss_evaluation_time_and_events_of_a_run_that_is_over(
    samestep: Command, make_run: MakeRun
) -> None:
    make_run("a", evaluation={6: 0.75}, checkpoints={6: 1.0}, result=DONE)
    result = samestep("watch", "a")
    assert result.exit_code == 0, result.output
    for text in (
        *("a  done  attempt 1, ddp, 0 workers  step 6 of 100", "loss 0.1250", "accuracy 0.2500"),
        *("test accuracy 0.7500", "checkpoint step 6", "goodput", "incidents 0"),
        "attempt 1 starts at step 0: mode ddp, 2 workers",
        "checkpoint at step 6",
    ):
        assert text in result.output


def test_watch_of_something_that_is_no_run_says_where_it_looked(samestep: Command) -> None:
    result = samestep("watch", "missing")
    assert result.exit_code == 2
    assert "no run directory 'missing'" in result.output


def test_watching_goes_on_where_it_was_while_the_ledger_grows(make_run: MakeRun) -> None:
    run = make_run("a", num_steps=4)
    watching = Watching(run)
    watching.read()
    assert (watching.num_steps, watching.num_workers, watching.attempt) == (4, 2, 1)
    assert watching.status == "died"  # nobody holds it
    writer = LedgerWriter(run, run_name="a")
    began = watching.accounting.wall_s
    time = watching.last.time if watching.last is not None else None
    assert time is not None
    records = [step_record(4 + n, time + n, elapsed_s=1.0 + n, training_s=1.0) for n in (0, 1)]
    writer.append([record.to_json() for record in records])
    watching.read()
    assert watching.num_steps == 6
    assert watching.samples_per_s() == 8.0
    assert watching.left_s() == 94.0
    assert watching.accounting.wall_s > began
    assert watching.accounting.seconds[TimePart.KEPT] > 0


def test_steps_that_came_with_one_message_do_not_make_a_run_fast(make_run: MakeRun) -> None:
    run = make_run("a", num_steps=1)
    watching = Watching(run)
    watching.read()
    assert watching.samples_per_s() is None
    time = watching.last.time if watching.last is not None else None
    assert time is not None
    writer = LedgerWriter(run, run_name="a")
    writer.append([step_record(1 + n, time + 2.0).to_json() for n in range(4)])
    watching.read()
    assert watching.samples_per_s() == 16.0


def test_a_run_that_never_took_a_step_can_be_watched(make_run: MakeRun) -> None:
    watching = Watching(make_run("a", num_steps=0))
    watching.read()
    assert "step 0 of 100" in shown(watching)


def test_losses_that_are_not_finite_are_counted_and_not_drawn() -> None:
    curve = Curve()
    for step, value in enumerate([1.0, math.nan, None, math.inf, 2.0]):
        curve.add(step, value)
    assert curve.points == [(0, 1.0), (4, 2.0)]
    assert curve.num_not_finite == 2


def test_a_long_curve_keeps_its_shape_in_few_points() -> None:
    curve = Curve(max_points=8)
    for step in range(1001):
        curve.add(step, float(step))
    points = curve.all_points
    assert len(points) <= 8
    assert points[0][0] == 0
    assert [value for _, value in points] == sorted(value for _, value in points)
    assert points[-1][0] <= 1000


def test_a_chart_goes_from_the_first_to_the_last_value() -> None:
    lines = chart([(0, 1.0), (10, 0.0)], width=31, height=4)
    assert len(lines) == 5
    assert lines[0].startswith(f"{'1':>10} ")
    assert lines[3].startswith(f"{'0':>10} ")
    assert lines[0][11] != "\u2800"
    assert lines[3][-1] != "\u2800"
    assert lines[4].split() == ["step", "0", "10"]
    assert {len(line) for line in lines} == {31}


def test_a_chart_of_one_value_or_none_is_no_error() -> None:
    assert len(chart([(3, 0.5)], width=40, height=3)) == 4
    assert chart([], width=40, height=3) == [""] * 4


def test_a_steep_curve_has_no_holes() -> None:
    lines = chart([(0, 0.0), (1, 1.0), (2, 0.0)], width=15, height=4)[:-1]
    assert all(line[11:].strip("\u2800") for line in lines)


def test_ui_names_pages_of_live_runs_alone_and_a_tracking_server(
    samestep: Command, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive, left = make_run("a"), make_run("left")
    announce(alive, "127.0.0.1:4711")
    announce(left, "127.0.0.1:4712")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow:5000")
    lease = leases.acquire(alive)
    result = samestep("ui")
    lease.release()
    assert result.exit_code == 0, result.output
    assert "4712" not in result.output
    assert "metrics of a: http://127.0.0.1:4711/metrics" in result.output
    assert "MLflow: http://mlflow:5000" in result.output


def test_ui_without_mlflows_file_says_what_to_give(samestep: Command, make_run: MakeRun) -> None:
    make_run("a")
    result = samestep("ui")
    assert result.exit_code == 2
    assert "there is no mlflow.db in" in result.output


def test_ui_on_a_taken_port_says_so(samestep: Command, make_run: MakeRun, tmp_path: Path) -> None:
    make_run("a")
    (tmp_path / "runs" / "mlflow.db").touch()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = samestep("ui", "--port", str(port))
    assert result.exit_code == 2
    assert f"can't listen on 127.0.0.1:{port}" in result.output
    assert "--port" in result.output


def test_evaluations_do_not_push_rare_events_out(make_run: MakeRun) -> None:
    watching = Watching(make_run("a", evaluation={5: 0.25, 6: 0.5}))
    watching.read()
    (started,) = [text for _, text in watching.events]
    assert started.startswith("attempt 1 starts")
    assert watching.evaluation == (6, {"accuracy": 0.5})
