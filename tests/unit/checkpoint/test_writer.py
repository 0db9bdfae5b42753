"""Writers: files made out of an image in shared memory, by a process that outlives nobody."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch
from safetensors.torch import load_file

from samestep.checkpoint.committed import commit
from samestep.checkpoint.image import Image
from samestep.checkpoint.job import DigestJob, FileJob, WriteJob, Written, perform
from samestep.checkpoint.layout import _STORABLE, storable_dtype
from samestep.checkpoint.manifest import CheckpointMeta, FileEntry, Manifest
from samestep.checkpoint.reading import digest_of, load_checkpoint
from samestep.checkpoint.state import State, state_sha256
from samestep.checkpoint.storage import Storage
from samestep.checkpoint.writer import InlineWriter, ProcessWriter, Writer
from samestep.checkpoint.writing import Outline, write_files
from samestep.errors import StorageError
from samestep.exact.digest import live_digest

META = CheckpointMeta(numerics={}, spec={}, created_s=0.0)
WAIT_S = 20.0


@pytest.fixture
def run(tmp_path: Path) -> Storage:
    return Storage.at(str(tmp_path / "run"))


@pytest.fixture
def process_writer() -> Iterator[ProcessWriter]:
    writer = ProcessWriter()
    yield writer
    writer.close()


def state_of(step: int) -> State:
    torch.manual_seed(step)
    large = torch.randn(1100, 1000)
    tensors = {
        "model/large": large,
        "model/strided": torch.randn(700, 900).t(),
        "model/pairs": torch.randn(400, 500, dtype=torch.complex128),
        "model/nothing": torch.zeros(3, 0),
        "model/flag": torch.tensor(True),
        "optimizer/0/step": torch.tensor(float(step)),
    }
    extras = {"inside": torch.arange(5), "again": [large[0].clone()]}
    return State(step=step, tensors=tensors, values={"extras": extras})


@pytest.mark.parametrize("num_parts", [1, 2, 3, 7])
def test_parts_written_by_several_make_the_same_checkpoint_as_one(
    run: Storage, tmp_path: Path, num_parts: int
) -> None:
    state = state_of(4)
    outline = Outline.of(state, num_parts=num_parts, stem="0001-")
    image = Image.shared(tmp_path / "image", outline.plan.num_bytes)
    for pieces in outline.parts:  # each by another worker
        image.fill(outline.plan, outline.tensors, pieces)
    jobs = [outline.job(run, part, image) for part in range(num_parts)]
    data = memoryview(image.data)
    written = [InlineWriter().write(job, data, WAIT_S) for job in jobs]
    manifest = outline.manifest(written[0], META)
    files = {**manifest.files, **{n: e for w in written[1:] for n, e in w.files.items()}}
    entries = {n: e if isinstance(e, FileEntry) else FileEntry(**e) for n, e in files.items()}
    whole = Manifest.from_json(replace(manifest, files=entries).to_json())
    commit(run, whole)
    back, _ = load_checkpoint(run, 4)
    assert live_digest(back.tensors) == live_digest(state.tensors)
    assert back.tensors["model/strided"].stride() == state.tensors["model/strided"].stride()
    assert back.extras["inside"].tolist() == [0, 1, 2, 3, 4]
    assert state_sha256(back) == state_sha256(state) == whole.digest == digest_of(run.root)
    sizes = [entry.num_bytes for name, entry in entries.items() if name.startswith("state-")]
    assert len(sizes) == num_parts


def test_the_digest_of_a_state_is_that_of_its_canonical_form(run: Storage) -> None:
    state = state_of(2)
    assert write_files(run, state, META).digest == state_sha256(state)


def test_every_dtype_that_can_be_kept_has_a_name_in_the_format(run: Storage) -> None:
    tensors = {name: torch.ones(3).to(storable_dtype(name)) for name in _STORABLE}
    state = State(step=1, tensors=tensors, values={"extras": {}})
    manifest = write_files(run, state, META)
    (file,) = [name for name in manifest.files if name.startswith("state-")]
    found = load_file(f"{run.root}/checkpoints/step-00000001/{file}")
    assert found.keys() == tensors.keys()
    assert all(found[n].dtype == t.dtype for n, t in tensors.items() if n != "complex128")


def job_of(run: Storage, image: Path, size: int = 9) -> WriteJob:
    return WriteJob(
        folder_uri=run.uri,
        image=str(image),
        files=[FileJob(name="a/file", head="head", segments=[(2, size - 2), (0, 1)])],
        digest=DigestJob(items=[("x\n", 0, 3), ("y\n", 5, 2)], tail="ä"),
    )


@pytest.mark.parametrize("kind", ["inline", "process"])
def test_a_writer_hashes_what_it_writes(
    run: Storage, tmp_path: Path, kind: str, process_writer: ProcessWriter
) -> None:
    writer: Writer = InlineWriter() if kind == "inline" else process_writer
    (tmp_path / "image").write_bytes(b"012345678")
    for _ in range(2):
        written = writer.write(job_of(run, tmp_path / "image"), memoryview(b"012345678"), WAIT_S)
        assert run.read("a/file") == b"head23456780"
        digest = hashlib.sha256(b"head23456780").hexdigest()
        assert written.files == {"a/file": {"num_bytes": 12, "sha256": digest}}
        assert written.digest == hashlib.sha256("x\n012y\n56ä".encode()).hexdigest()


def test_storage_that_fails_is_told_and_the_writer_goes_on(
    run: Storage, tmp_path: Path, process_writer: ProcessWriter
) -> None:
    (tmp_path / "image").write_bytes(b"012345678")
    run.write("blocked", b"a file where a folder should be")
    blocked = Storage.at(f"{run.root}/blocked")
    with pytest.raises(StorageError, match=r"can't write .*/blocked/a/file"):
        process_writer.write(job_of(blocked, tmp_path / "image"), memoryview(b""), WAIT_S)
    assert process_writer.write(job_of(run, tmp_path / "image"), memoryview(b""), WAIT_S).files


def test_a_writer_that_is_killed_fails_its_job_and_the_next_one_gets_another(
    run: Storage, tmp_path: Path, process_writer: ProcessWriter
) -> None:
    (tmp_path / "image").write_bytes(b"012345678")
    process_writer.start()
    assert process_writer._process is not None
    os.kill(process_writer._process.pid, signal.SIGSTOP)
    killer = threading.Timer(0.2, process_writer.abort)
    killer.start()
    with pytest.raises(StorageError, match="the writer process ended in the middle of it"):
        process_writer.write(job_of(run, tmp_path / "image"), memoryview(b""), WAIT_S)
    killer.join()
    assert process_writer.write(job_of(run, tmp_path / "image"), memoryview(b""), WAIT_S).files


def test_a_writer_that_takes_too_long_fails_its_job(
    run: Storage, tmp_path: Path, process_writer: ProcessWriter
) -> None:
    (tmp_path / "image").write_bytes(b"012345678")
    process_writer.start()
    assert process_writer._process is not None
    os.kill(process_writer._process.pid, signal.SIGSTOP)
    with pytest.raises(StorageError, match=r"not written within 0.1 s; the storage hangs"):
        process_writer.write(job_of(run, tmp_path / "image"), memoryview(b""), 0.1)


PARENT = """
import sys
from samestep.checkpoint.writer import ProcessWriter
writer = ProcessWriter()
writer.start()
print(writer._process.pid, flush=True)
sys.stdin.read()
"""


def test_a_writer_ends_with_its_parent() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", PARENT]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, **pipes) as parent:  # type: ignore[call-overload]
        assert parent.stdout is not None
        writer = psutil.Process(int(parent.stdout.readline()))
        parent.send_signal(signal.SIGKILL)
    _, alive = psutil.wait_procs([writer], timeout=WAIT_S)
    assert not alive


def test_a_full_file_system_for_images_is_told_before_a_copy() -> None:
    with pytest.raises(StorageError, match=r"can't get \d+ bytes of shared memory at .*give"):
        Image.shared(Path("/dev/shm/samestep-test-too-large"), 1 << 60)


def test_the_process_gives_way_to_training(
    run: Storage, tmp_path: Path, process_writer: ProcessWriter
) -> None:
    (tmp_path / "image").write_bytes(b"012345678")
    process_writer.write(job_of(run, tmp_path / "image"), memoryview(b""), WAIT_S)
    assert process_writer._process is not None
    pid = process_writer._process.pid
    assert os.getpriority(os.PRIO_PROCESS, pid) == 19
    # Among the trainer's session, where that priority counts, and out of reach of its Ctrl-C.
    assert (os.getsid(pid), os.getpgid(pid)) == (os.getsid(0), pid)


def test_a_writer_rests_between_pieces_until_it_is_hurried_or_out_of_patience(run: Storage) -> None:
    data = memoryview(bytes(16 << 20))
    files = [FileJob(name="file", head="", segments=[(0, len(data))])]
    job = WriteJob(folder_uri=run.uri, image=None, files=files, patience_s=60.0)
    hurried = threading.Event()
    # Of 16 pieces; those that took next to no time are not rested after.
    assert perform(job, data, hurried=hurried).num_rests >= 4
    assert perform(replace(job, patience_s=0.0), data, hurried=hurried).num_rests == 0
    assert perform(job, data).num_rests == 0
    hurried.set()
    assert perform(job, data, hurried=hurried).num_rests == 0
    assert run.read("file") == data


def test_a_writer_process_is_hurried_before_its_job_and_in_it(
    run: Storage, tmp_path: Path, process_writer: ProcessWriter
) -> None:
    size = 64 << 20
    (tmp_path / "image").write_bytes(bytes(size))
    job = WriteJob(
        folder_uri=run.uri,
        image=str(tmp_path / "image"),
        files=[],
        digest=DigestJob(items=[("", 0, size)], tail=""),
        patience_s=600.0,
    )

    def write() -> Written:
        return process_writer.write(job, memoryview(b""), 3 * WAIT_S)

    process_writer.hurry()  # of no process: remembered for the first
    first = write()
    at_leisure = write()
    timer = threading.Timer(0.05, process_writer.hurry)  # it takes a second at leisure
    timer.start()
    in_it = write()
    timer.join()
    assert first.num_rests == 0
    assert at_leisure.num_rests > 16
    assert in_it.num_rests < at_leisure.num_rests
    assert write().num_rests > 16  # hurried once is hurried for one job
    assert {first.digest, at_leisure.digest, in_it.digest} == {
        hashlib.sha256(bytes(size)).hexdigest()
    }
