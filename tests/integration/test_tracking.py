"""Runs delivered to a real MLflow: in a SQLite file, and to servers that come, go and hang."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tracked_story import MakeStory, free_port, history, only_run

from samestep import Outcome, train
from samestep.checkpoint.storage import Storage
from samestep.errors import InputError
from samestep.names import LEDGER_ARTIFACT, Event, Series, Tag
from samestep.spec import JobSpec, dump_spec
from samestep.telemetry.mlflow_client import load_mlflow
from samestep.telemetry.records import StepRecord
from samestep.telemetry.sinks import deliver_rest
from samestep.telemetry.spool import START, Record, Spool

WaitUntil = Callable[[Callable[[], Any], float, str], Any]
ABSENT = "does not take records"

HELD = """
import threading
from pathlib import Path

from tiny import Tiny


class Held(Tiny):
    def __init__(self, gate, holds):
        super().__init__()
        self.gates = {step: Path(gate, str(step)) for step in holds}

    def before_step(self, model, step):
        while step in self.gates and not self.gates[step].exists():
            threading.Event().wait(0.02)
        super().before_step(model, step)
"""

pytestmark = pytest.mark.timeout(400)
# torch.export and MLflow's loaders use what torch has marked as old.
packs_a_model = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"
)


def records_of(run: Storage) -> list[Record]:
    """What the run's ledger holds."""
    return [line.record for line in Spool(run, START).read(10_000)]


def steps_of(run: Storage) -> list[tuple[int, float]]:
    """Each step and its loss, as the run's ledger holds them."""
    return [(r.step, r.loss) for r in records_of(run) if isinstance(r, StepRecord)]


@pytest.fixture
def serve(tmp_path: Path, wait_until: WaitUntil) -> Iterator[Callable[[int], Callable[[], None]]]:
    """Starts MLflow's server on a port; what it returns stops it."""
    started: list[subprocess.Popen[bytes]] = []

    def stop(process: subprocess.Popen[bytes]) -> None:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(20)

    def start(port: int) -> Callable[[], None]:
        folder = tmp_path / "server"
        folder.mkdir(exist_ok=True)
        with (folder / "log").open("ab") as log:
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "mlflow", "server", "--workers", "1"),
                    *("--host", "127.0.0.1", "--port", str(port)),
                    *("--backend-store-uri", f"sqlite:///{folder}/mlflow.db"),
                    *("--artifacts-destination", str(folder / "artifacts")),
                ],
                cwd=folder,
                env={
                    **os.environ,
                    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
                    "MLFLOW_DISABLE_TELEMETRY": "true",
                },
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        started.append(process)

        def answers() -> bool:
            assert process.poll() is None, (folder / "log").read_text()[-3000:]
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
                    return True
            except OSError:
                return False

        wait_until(answers, 120, "the server answers")
        return lambda: stop(process)

    yield start
    for process in started:
        stop(process)


def test_a_run_over_two_attempts_and_recorders_is_one_mlflow_run_with_each_point_once(
    tmp_path: Path, make_story: MakeStory
) -> None:
    long = {f"p{number}": number for number in range(150)}
    long |= {"x": "a" * 20_000, "y": "a" * 19_999 + "b"}
    story = make_story(args=long)
    story.open()
    story.begin(0)
    story.steps(0, 6)
    story.evaluate(6)
    assert story.recorder.drain() == []
    story.recorder.close()
    uri = f"sqlite:///{tmp_path}/runs/mlflow.db"
    first = only_run(uri)
    assert first.info.status == "KILLED"
    story.open()
    story.begin(4, workers=3)
    story.steps(4, 9)
    story.evaluate(9)
    story.finish(step=9)
    story.recorder.close()
    run = only_run(uri)
    run_id = run.info.run_id
    assert run_id == first.info.run_id
    assert run.info.status == "FINISHED"
    assert history(uri, run_id, Series.LOSS) == [(step, 1 / (step + 3)) for step in range(9)]
    assert [step for step, _ in history(uri, run_id, "train/a:2b:b")] == list(range(9))
    assert history(uri, run_id, "lr/group_1") == [(step, 0.2) for step in range(9)]
    assert history(uri, run_id, "eval/accuracy") == [(6, 0.06), (9, 0.09)]
    assert run.data.tags[Tag.ATTEMPT] == "2"
    assert run.data.tags[Tag.WORKERS] == "3"
    assert run.data.tags[Tag.STATE_DIGEST] == "d" * 64
    params = run.data.params
    assert [params[f"args.p{number}"] for number in range(150)] == list(map(str, range(150)))
    assert len(params["args.x"]) <= 500
    assert "cut: 20000 characters" in params["args.x"]
    assert params["args.x"] != params["args.y"]
    client = load_mlflow().MlflowClient(tracking_uri=uri)
    names = {item.path for item in client.list_artifacts(run_id)}
    files = {"spec.yaml", "params.json", "requirements.txt", "numerics.json"}
    assert names == {*files, LEDGER_ARTIFACT}
    whole = load_mlflow().artifacts.load_dict(f"{run.info.artifact_uri}/params.json")
    assert whole["args.x"] == "a" * 20_000


@packs_a_model
def test_a_server_that_comes_goes_and_comes_in_mid_run_changes_nothing_and_gets_each_point_once(
    make_spec: Callable[..., JobSpec],
    folder: Path,
    straight: Outcome,
    tmp_path: Path,
    serve: Callable[[int], Callable[[], None]],
    wait_until: WaitUntil,
) -> None:
    (tmp_path / "held.py").write_text(HELD)
    port = free_port()
    uri = f"http://127.0.0.1:{port}"
    spec = make_spec(
        mode="local",
        workload="held:Held",
        args={"gate": str(tmp_path), "holds": [3, 6, 9]},
        tracking={"uri": uri},
    )
    run = Storage.at(f"{spec.storage}/r")
    said: list[str] = []
    delivered: list[int] = []

    def observe(status: dict[str, Any]) -> None:
        said.extend(item["text"] for item in status["messages"])
        delivered.append(status["mlflow"]["num_steps"])

    def num_said(text: str) -> int:
        return sum(text in line for line in said)

    def num_steps() -> int:
        return len(steps_of(run)) if run.exists("spec.yaml") else 0

    def stir() -> None:
        try:
            wait_until(lambda: num_said(ABSENT) == 1, 90, "a warning")
            stop = serve(port)
            wait_until(lambda: max(delivered) > 0, 90, "what waited arrives")
            stop()
            (tmp_path / "3").touch()
            wait_until(lambda: num_said(ABSENT) == 2, 90, "the second outage")
            (tmp_path / "6").touch()
            wait_until(lambda: num_steps() > 6, 90, "steps without a server")
            assert max(delivered) <= 3
            serve(port)
            wait_until(lambda: max(delivered) > 6, 90, "what waited arrives")
        finally:
            for step in (3, 6, 9):
                (tmp_path / str(step)).touch()

    with ThreadPoolExecutor(1) as pool:
        stirred = pool.submit(stir)
        outcome = train(spec, name="r", search=[tmp_path, folder], observer=observe)
        stirred.result()
    assert (outcome.status, outcome.digest) == ("done", straight.digest)
    assert num_said(ABSENT) == num_said("mlflow is back") == 2
    told = only_run(uri)
    assert told.info.status == "FINISHED"
    assert steps_of(run) == steps_of(Storage.at(straight.run))
    assert history(uri, told.info.run_id, Series.LOSS) == steps_of(run)
    assert len(steps_of(run)) == 12
    for name in told.data.metrics:
        if not name.startswith("system/"):
            steps = [step for step, _ in history(uri, told.info.run_id, name)]
            assert steps == sorted(set(steps)), name


@packs_a_model
def test_a_run_that_goes_back_has_each_point_once_per_branch(
    make_spec: Callable[..., JobSpec], folder: Path
) -> None:
    spec = make_spec(
        mode="local",
        args={"nan_at": 7},
        incidents={"non_finite": "rollback", "rollback_steps": 3},
        tracking={"enabled": True},
    )
    outcome = train(spec, name="r", search=[folder])
    assert outcome.status == "done"
    branches: list[list[StepRecord]] = [[]]
    for record in records_of(Storage.at(outcome.run)):
        if isinstance(record, StepRecord):
            branches[-1].append(record)
        elif record.event == Event.ROLLED_BACK:
            branches.append([])
    went, goes = ([record.step for record in branch] for branch in branches)
    assert (went, goes) == (list(range(7)), list(range(4, outcome.step)))
    uri = f"sqlite:///{spec.storage}/mlflow.db"
    told = only_run(uri)
    assert told.data.tags[Tag.BRANCH] == "1"
    run_id = told.info.run_id
    rates = [(record.step, record.lr[0]) for branch in branches for record in branch]
    assert history(uri, run_id, Series.LEARNING_RATE) == sorted(rates)
    # The steps that went wrong are left out the second time, and have no loss then.
    losses = [step for step, _ in history(uri, run_id, Series.LOSS)]
    assert losses == [*range(7), *range(8, outcome.step)]


def test_a_server_that_never_answers_holds_up_nothing(make_story: MakeStory) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=64) as silent:
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
        story = make_story(tracking={"uri": uri})
        story.open()
        story.begin(0)
        started = time.monotonic()
        for step in range(50):
            story.steps(step, step + 1)
        story.finish(step=50)
        assert time.monotonic() - started < 3
        story.recorder.close()
        assert time.monotonic() - started < 20
        assert sum(ABSENT in text for text in story.heard()) == 1
    assert story.num_delivered() == 0


@pytest.mark.parametrize("server", ["away", "silent"])
def test_the_weights_are_the_same_whatever_becomes_of_the_tracking_server(
    make_spec: Callable[..., JobSpec], folder: Path, straight: Outcome, server: str
) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=64) as silent:
        port = silent.getsockname()[1] if server == "silent" else free_port()
        tracking = {"uri": f"http://127.0.0.1:{port}"}
        said: list[str] = []

        def observe(status: dict[str, Any]) -> None:
            said.extend(item["text"] for item in status["messages"])

        spec = make_spec(mode="local", tracking=tracking)
        outcome = train(spec, name="r", search=[folder], observer=observe)
    assert (outcome.status, outcome.digest) == ("done", straight.digest)
    assert sum(ABSENT in text for text in said) == 1


def test_a_required_server_that_is_not_there_refuses_the_start_and_frees_the_run(
    make_story: MakeStory,
) -> None:
    uri = f"http://127.0.0.1:{free_port()}"
    story = make_story(tracking={"uri": uri, "required": True})
    with pytest.raises(InputError, match=r"tracking\.required is true.*can't be used"):
        story.open()
    names = [thread.name for thread in threading.enumerate()]
    assert [name for name in names if name.startswith("samestep-sink")] == []
    story = make_story(tracking={"enabled": False})
    story.open()
    story.recorder.close()


def test_a_run_deleted_in_mlflow_is_delivered_again_from_its_first_step(
    tmp_path: Path, make_story: MakeStory
) -> None:
    story = make_story()
    story.open()
    story.begin(0)
    story.steps(0, 4)
    assert story.recorder.drain() == []
    story.recorder.close()
    uri = f"sqlite:///{tmp_path}/runs/mlflow.db"
    first = only_run(uri)
    load_mlflow().MlflowClient(tracking_uri=uri).delete_run(first.info.run_id)
    story.open()
    story.begin(4)
    story.steps(4, 6)
    story.finish(step=6)
    story.recorder.close()
    run = only_run(uri)
    assert run.info.run_id != first.info.run_id
    assert [step for step, _ in history(uri, run.info.run_id, Series.LOSS)] == list(range(6))


def test_an_experiment_that_was_deleted_costs_one_warning_until_it_is_restored(
    tmp_path: Path, make_story: MakeStory, wait_until: WaitUntil
) -> None:
    uri = f"sqlite:///{tmp_path}/runs/mlflow.db"
    (tmp_path / "runs").mkdir()
    client = load_mlflow().MlflowClient(tracking_uri=uri)
    artifacts = f"file://{tmp_path}/artifacts"  # else in the working directory
    gone = client.create_experiment("samestep", artifact_location=artifacts)
    client.delete_experiment(gone)
    story = make_story()
    story.open()
    story.begin(0)
    story.steps(0, 4)
    assert story.recorder.drain() == ["mlflow"]
    said = "its experiment 'samestep' is deleted; restore it, or set tracking.experiment"
    wait_until(lambda: any(said in text for text in story.heard()), 30, "a warning")
    client.restore_experiment(gone)
    wait_until(lambda: story.recorder.drain() == [], 60, "what waited arrives")
    story.finish(step=4)
    story.recorder.close()
    assert sum(said in text for text in story.heard()) == 1
    run = only_run(uri)
    assert run.info.experiment_id == gone
    assert [step for step, _ in history(uri, run.info.run_id, Series.LOSS)] == [0, 1, 2, 3]


def test_what_a_run_that_is_over_could_not_deliver_is_delivered_on_request(
    tmp_path: Path, make_story: MakeStory
) -> None:
    story = make_story(tracking={"enabled": False})
    story.open()
    story.begin(0)
    story.steps(0, 3)
    story.finish(step=3)
    story.recorder.close()
    later = make_story()
    known = {"run": "a", "spec_yaml": dump_spec(later.spec)}
    (line,) = deliver_rest(later.plan(), later.uri, **known)
    uri = f"sqlite:///{tmp_path}/runs/mlflow.db"
    run = only_run(uri)
    assert run.info.run_id in line
    assert run.info.status == "FINISHED"
    assert [step for step, _ in history(uri, run.info.run_id, Series.LOSS)] == [0, 1, 2]
    assert deliver_rest(later.plan(), later.uri, **known) == []


def test_the_ui_shows_the_runs_until_a_signal_and_leaves_nothing_behind(
    tmp_path: Path,
    make_story: MakeStory,
    start_command: Callable[..., subprocess.Popen[str]],
    wait_until: WaitUntil,
) -> None:
    story = make_story()
    story.open()
    story.begin(0)
    story.finish(step=0)
    story.recorder.close()
    port = free_port()
    uri = f"http://127.0.0.1:{port}"
    ui = start_command("ui", tmp_path / "runs", "--port", str(port), cwd=tmp_path)

    def answers() -> bool:
        assert ui.poll() is None, ui.communicate()
        try:
            with urllib.request.urlopen(f"{uri}/health", timeout=2):
                return True
        except OSError:
            return False

    wait_until(answers, 120, "MLflow's pages answer")
    assert only_run(uri).data.tags[Tag.RUN] == "a"
    ui.send_signal(signal.SIGTERM)
    output, _ = ui.communicate(timeout=60)
    assert ui.returncode == 0, output
    assert "metrics: no run here is alive" in output
