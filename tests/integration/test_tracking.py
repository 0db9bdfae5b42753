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
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from samestep import Outcome, train
from samestep.checkpoint.storage import Storage
from samestep.errors import InputError
from samestep.names import LEDGER_ARTIFACT, Event, Series, Tag
from samestep.replay.report_delivery import deliver
from samestep.spec import JobSpec, dump_spec, parse_spec
from samestep.telemetry.mlflow_client import load_mlflow
from samestep.telemetry.recorder import Recorder
from samestep.telemetry.records import EventRecord, StepRecord
from samestep.telemetry.sinks import SinkPlan, deliver_rest, plan_sinks
from samestep.telemetry.tracking_file import read_tracked, write_tracked

WaitUntil = Callable[[Callable[[], Any], float, str], Any]
JOB = {"workload": "digits:Digits", "batch_size": 8, "shards": 2, "max_steps": 100}
NO_METRICS = {"enabled": False}
INCIDENT = "exception-step-00000002-attempt-1"
REPORT = (f"incidents/{INCIDENT}/report.html", INCIDENT)
"""Where the report lies, and the incident that it is of."""
NUMERICS = {"binding": {"torch": "2.13"}, "informational": {}}

pytestmark = pytest.mark.timeout(400)


class Story:
    """A run whose values depend on the step alone, told to a recorder as workers would."""

    def __init__(self, folder: Path, name: str = "a", **fields: Any) -> None:
        self.spec: JobSpec = parse_spec(
            {**JOB, "metrics": NO_METRICS, "storage": str(folder / "runs"), **fields}
        )
        self.name = name
        self.uri = str(folder / "runs" / name)
        self.messages: list[str] = []
        self.recorder: Any = None
        self.attempt = self.sequence = 0

    def plan(self) -> SinkPlan:
        return plan_sinks(self.spec, self.uri, workload_folder=Path(__file__).parent, environ={})

    def open(self) -> None:
        plan = self.plan()
        self.recorder = Recorder(
            self.uri,
            run=self.name,
            spec_yaml=dump_spec(self.spec),
            sinks=plan.make(),
            about=plan.about,
        )
        self.seen = 0

    def begin(self, start_step: int, workers: int = 2) -> None:
        info = {"start_step": start_step, "mode": "ddp", "world_size": workers}
        self.attempt = self.recorder.begin_attempt({**info, "numerics": NUMERICS})
        self.sequence = 0

    def steps(self, start: int, stop: int) -> None:
        self.push([step_record(step).to_json() for step in range(start, stop)])

    def push(self, records: list[dict[str, Any]]) -> None:
        self.sequence += 1
        self.recorder.push(self.attempt, "0", self.sequence, records)

    def evaluate(self, step: int) -> None:
        fields = {"metrics": {"accuracy": step / 100}, "samples": 5}
        event = EventRecord(
            event=Event.EVALUATION, step=step, attempt=self.attempt, time=5.0 + step, fields=fields
        )
        self.push([event.to_json()])

    def finish(self, status: str = "done", step: int = 0) -> None:
        result = {"status": status, "step": step, "digest": "d" * 64, "message": ""}
        self.recorder.finish(self.attempt, {**result, "evaluation": None, "exit_status": 0})

    def heard(self) -> list[str]:
        status = self.recorder.status(self.seen)
        self.seen = max([self.seen, *(item["number"] for item in status["messages"])])
        self.messages += [item["text"] for item in status["messages"]]
        return self.messages

    def num_delivered(self) -> int:
        tracked = read_tracked(Storage.at(self.uri))
        return tracked.next_step if tracked else 0


MakeStory = Callable[..., Story]


def step_record(step: int) -> StepRecord:
    return StepRecord(
        step=step,
        epoch=0,
        samples=8,
        loss=1.0 / (step + 3),
        shard_losses=[0.1, None],
        shard_weights=[8.0, None],
        grad_norm=0.5,
        lr=[0.1, 0.2],
        ids=f"{step:032x}",
        metrics={"accuracy": step / 100, "a+b": float("nan")},
        timing={"step_s": 0.01, "data_wait_s": 0.001},
    )


def history(uri: str, run_id: str, name: str) -> list[tuple[int, float]]:
    client = load_mlflow().MlflowClient(tracking_uri=uri)
    return sorted((m.step, m.value) for m in client.get_metric_history(run_id, name))


def only_run(uri: str) -> Any:
    client = load_mlflow().MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("samestep")
    (run,) = client.search_runs([experiment.experiment_id])
    return run


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@pytest.fixture
def make_story(tmp_path: Path) -> Iterator[Callable[..., Story]]:
    made: list[Story] = []

    def make(**fields: Any) -> Story:
        made.append(Story(tmp_path, **fields))
        return made[-1]

    yield make
    for story in made:
        if story.recorder is not None:
            story.recorder.close()


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


def test_what_a_server_missed_while_it_was_away_arrives_later_and_once(
    make_story: MakeStory, serve: Callable[[int], Callable[[], None]], wait_until: WaitUntil
) -> None:
    port = free_port()
    uri = f"http://127.0.0.1:{port}"
    story = make_story(tracking={"uri": uri})
    story.open()
    story.begin(0)
    story.steps(0, 5)
    absent = "does not take records"
    wait_until(lambda: any(absent in text for text in story.heard()), 30, "a warning")
    stop = serve(port)
    wait_until(lambda: story.num_delivered() == 5, 90, "what waited arrives")
    stop()
    story.steps(5, 9)
    wait_until(lambda: sum(absent in t for t in story.heard()) == 2, 60, "the second outage")
    story.steps(9, 12)
    stop = serve(port)
    story.finish(step=12)
    wait_until(lambda: story.num_delivered() == 12, 90, "what waited arrives")
    assert sum(absent in text for text in story.heard()) == 2
    assert sum("mlflow is back" in text for text in story.heard()) == 2
    story.recorder.close()
    run = only_run(uri)
    assert run.info.status == "FINISHED"
    expected = [(step, 1 / (step + 3)) for step in range(12)]
    assert history(uri, run.info.run_id, Series.LOSS) == expected
    stop()


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
        assert sum("does not take records" in text for text in story.heard()) == 1
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
    assert sum("does not take records" in text for text in said) == 1


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


def delivered(story: Story) -> Storage:
    """The directory of a run of two steps that is whole in MLflow."""
    story.open()
    story.begin(0)
    story.steps(0, 2)
    story.finish(step=2)
    story.recorder.close()
    return Storage.at(story.uri)


def test_the_report_of_an_incident_is_an_artifact_equal_to_the_file_beside_the_incident(
    tmp_path: Path, make_story: MakeStory
) -> None:
    run = delivered(make_story())
    uri = f"sqlite:///{tmp_path}/runs/mlflow.db"
    there = only_run(uri)
    name, incident = REPORT
    for page in ("<p>the first</p>", "<p>h\u00fcbsch, made once more</p>\n"):
        assert deliver(run, incident, page) == [
            f"report: {run.uri}/{name}",
            f"report: artifact {name} of MLflow run {there.info.run_id} at {uri}",
        ]
        found = load_mlflow().artifacts.download_artifacts(
            f"{there.info.artifact_uri}/{name}", dst_path=str(tmp_path / "found")
        )
        assert Path(found).read_bytes() == run.read(name) == page.encode()
    after = only_run(uri)
    assert (after.info.run_id, after.info.status) == (there.info.run_id, "FINISHED")


def test_a_report_that_mlflow_can_not_take_stays_with_the_run_and_one_line_tells_why(
    tmp_path: Path, make_story: MakeStory
) -> None:
    run = delivered(make_story())
    database = tmp_path / "runs" / "mlflow.db"
    uri = f"sqlite:///{database}"
    client = load_mlflow().MlflowClient(tracking_uri=uri)
    there, tracked = only_run(uri), read_tracked(run)
    assert tracked is not None
    name, incident = REPORT

    def told_why(page: str) -> str:
        own, told = deliver(run, incident, page)
        assert own == f"report: {run.uri}/{name}"
        assert run.read(name) == page.encode()
        return told.removeprefix("the report is not in MLflow: ")

    write_tracked(run, replace(tracked, uri=f"http://127.0.0.1:{free_port()}"))
    assert told_why("no server").startswith("no answer: ")
    write_tracked(run, tracked)
    client.delete_run(there.info.run_id)
    assert told_why("no run").startswith("there is no run ")
    # Nothing is made in MLflow for the report's sake.
    assert client.search_runs([there.info.experiment_id]) == []
    database.unlink()
    assert told_why("no file") == f"there is no file {uri}"
    assert not database.exists()


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
