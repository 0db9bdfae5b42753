"""A run on S3: a server that speaks its protocol, on loopback, and pyarrow's own client."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from pyarrow import fs
from typer.testing import CliRunner

from samestep import JobSpec, RunInUseError, StorageError, load_weights, parse_spec, train
from samestep.checkpoint.committed import commit, list_checkpoints
from samestep.checkpoint.image import Image
from samestep.checkpoint.manifest import CheckpointMeta
from samestep.checkpoint.reading import digest_of, newest_whole, set_aside
from samestep.checkpoint.retention import apply_retention
from samestep.checkpoint.state import State, state_sha256
from samestep.checkpoint.storage import Storage
from samestep.checkpoint.writer import ProcessWriter
from samestep.checkpoint.writing import Outline, write_files
from samestep.cli.main import app
from samestep.errors import BundleError
from samestep.incidents.bundle import folder_of
from samestep.incidents.packing import pack, unpack
from samestep.incidents.record import Incident, write
from samestep.names import Event, IncidentKind
from samestep.replay.bundle_source import BundleSource
from samestep.replay.checkpoints import checkpoint_lines
from samestep.telemetry import lease as leases
from samestep.telemetry.ledger import events, steps

# Its threads end with the process, which ends with its input.
SERVER = """
import sys
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()
server.stop()
"""
META = CheckpointMeta(numerics={}, spec={}, created_s=0.0)
WORKLOAD = """
import torch
from torch import nn

import samestep


class Bucketed(samestep.Workload):
    def model(self):
        return nn.Linear(2, 1)

    def data(self):
        return torch.utils.data.TensorDataset(torch.randn(10, 2))

    def loss(self, model, batch):
        return model(batch[0]).square().mean()

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
"""


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        yield int(server.stdout.readline())
        server.communicate(timeout=20)


@pytest.fixture
def storage(port: int, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A URI with options: where the server is, and how it is spoken to."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "someone")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "something")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    client = fs.S3FileSystem(
        endpoint_override=f"127.0.0.1:{port}", scheme="http", allow_bucket_creation=True
    )
    bucket = f"bucket-{abs(hash(request.node.name)) % 10**9}"
    client.create_dir(bucket)
    return f"s3://{bucket}/runs?endpoint_override=127.0.0.1:{port}&scheme=http&region=us-east-1"


@pytest.fixture
def run(storage: str) -> Storage:
    return Storage.at(storage).child("one")


def state_of(step: int) -> State:
    torch.manual_seed(step)
    tensors = {"model/w": torch.randn(300, 1000), "model/b": torch.randn(7)}
    return State(step=step, tensors=tensors, values={"extras": {}})


def test_a_uri_with_options_names_the_folder_before_them(run: Storage, storage: str) -> None:
    run.write("a/file", b"here")
    again = Storage.at(run.uri)
    assert again.read("a/file") == b"here"
    assert run.uri.partition("?")[0].endswith("/runs/one")
    assert Storage.at(storage).list() == ["one"]


def test_checkpoints_are_kept_verified_set_aside_and_thinned_out(run: Storage) -> None:
    for step in (1, 2, 3):
        commit(run, write_files(run, state_of(step), META))
    assert digest_of(run.uri) == state_sha256(state_of(3))
    run.write("checkpoints/step-00000003/state-00000.safetensors", b"cut")
    lines = checkpoint_lines(run, verify=True)
    assert [(line.step, line.status) for line in lines] == [
        (1, "whole"), (2, "whole"), (3, "damaged"),
    ]  # fmt: skip
    loaded, damaged = newest_whole(run)
    assert loaded is not None
    assert loaded.step == 2
    set_aside(run, damaged[0])
    assert apply_retention(run, keep=1) == [1]
    assert [(info.step, info.whole) for info in list_checkpoints(run)] == [(2, True)]
    assert checkpoint_lines(run, verify=True)[-1].status == "set aside"


def test_a_writer_process_reaches_the_store_by_its_uri(run: Storage, tmp_path: Path) -> None:
    outline = Outline.of(state_of(5))
    image = Image.shared(tmp_path / "image", outline.plan.num_bytes)
    image.fill(outline.plan, outline.tensors, outline.parts[0])
    writer = ProcessWriter()
    try:
        written = writer.write(outline.job(run, 0, image), image.memory, 60)
    finally:
        writer.close()
    commit(run, outline.manifest(written, META))
    assert digest_of(run.uri) == state_sha256(state_of(5))


def test_a_lease_is_held_by_one_and_given_back(run: Storage) -> None:
    lease = leases.acquire(run)
    with pytest.raises(RunInUseError, match="is in use by"):
        leases.acquire(run, wait_s=0.5)
    lease.release()
    leases.acquire(run, wait_s=0.5).release()


def test_a_bucket_that_is_not_there_is_refused(storage: str) -> None:
    uri = storage.replace("s3://bucket", "s3://nowhere")
    with pytest.raises(StorageError, match="can't write nowhere"):
        Storage.at(uri).write("file", b"")


@pytest.fixture
def make_spec(storage: str, tmp_path: Path) -> Iterator[Callable[..., JobSpec]]:
    (tmp_path / "bucketed.py").write_text(WORKLOAD)

    def make(**fields: Any) -> JobSpec:
        job = {"workload": "bucketed:Bucketed", "batch_size": 4, "shards": 2, "mode": "local"}
        job |= {"storage": storage, "tracking": {"enabled": False}}
        return parse_spec({**job, "checkpoint": {"every_steps": 2, "keep": 2}, **fields})

    yield make
    sys.modules.pop("bucketed", None)


def test_a_run_in_a_bucket_trains_resumes_and_ends_as_one_on_disk(
    make_spec: Callable[..., JobSpec], tmp_path: Path
) -> None:
    calm = train(make_spec(max_steps=7, storage=str(tmp_path / "runs")), search=[tmp_path])
    half = train(make_spec(max_steps=4), search=[tmp_path])
    assert half.run.startswith("s3://")
    end = train(make_spec(max_steps=7), search=[tmp_path])
    assert end.digest == calm.digest == digest_of(end.run)
    run = Storage.at(end.run)
    assert [info.step for info in list_checkpoints(run)] == [6, 7]
    assert sorted(steps(run)) == list(range(7))
    assert [event.step for event in events(run, Event.CHECKPOINT_COMMITTED)] == [2, 4, 6, 7]
    assert load_weights(end.run)["weight"].shape == (1, 2)
    watched = CliRunner().invoke(app, ["watch", end.run])
    assert watched.exit_code == 0, watched.output
    assert "done  attempt 2, local" in watched.output
    assert "step 7 of 7" in watched.output
    over = train(make_spec(max_steps=4), search=[tmp_path], restart=True)
    assert over.digest == half.digest
    listed = Storage.at(end.run.replace("/bucketed?", "?")).list()
    assert [name for name in listed if not name.startswith(".")] == [
        "bucketed", "bucketed.replaced-1",
    ]  # fmt: skip


def test_a_bundle_in_a_bucket_is_read_there_and_packed_from_there(
    make_spec: Callable[..., JobSpec], tmp_path: Path
) -> None:
    run = Storage.at(train(make_spec(max_steps=4), search=[tmp_path]).run)
    lost = Incident(kind=IncidentKind.CRASH, step=5, attempt=1, message="killed", time=1.0)
    lost = write(run, lost)
    train(make_spec(max_steps=7), search=[tmp_path])
    folder = folder_of(run, lost.id)
    source = BundleSource(folder)
    assert source.bundle.sample_steps == (4, 5)
    assert source.start().state.step == 4
    assert source.batch(source.plans(5)[1])[0].shape == (1, 2)
    pack(folder, tmp_path / "one.zip")
    assert unpack(tmp_path / "one.zip", tmp_path / "here") == source.bundle
    run.write(f"incidents/{lost.id}/state/more", b"")
    with pytest.raises(BundleError, match="state/more is not listed"):
        BundleSource(folder)
