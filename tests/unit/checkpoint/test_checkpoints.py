"""Files of a checkpoint: written, verified, damaged, set aside, thinned out."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from pyarrow import fs
from safetensors.torch import load_file
from torch import nn
from torch.optim import SGD

from samestep.checkpoint.committed import commit, list_checkpoints
from samestep.checkpoint.manifest import CheckpointMeta, Manifest, step_name, step_of
from samestep.checkpoint.reading import (
    digest_of,
    load_checkpoint,
    load_weights,
    newest_whole,
    set_aside,
)
from samestep.checkpoint.retention import apply_retention
from samestep.checkpoint.state import Parts, State, collect, state_sha256
from samestep.checkpoint.storage import Storage
from samestep.checkpoint.writing import write_files
from samestep.errors import CheckpointError
from samestep.exact.digest import live_digest

STATE_FILE = "state-00000.safetensors"
META = CheckpointMeta(numerics={"threads": 1}, spec={"seed": 0}, created_s=1234.5)


@pytest.fixture
def run(tmp_path: Path) -> Storage:
    return Storage.at(str(tmp_path / "run"))


def make_state(step: int) -> State:
    torch.manual_seed(step)
    model = nn.Linear(3, 2)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    return collect(Parts(model=model, optimizer=optimizer), step=step, extras={})


def save(run: Storage, step: int) -> Manifest:
    manifest = write_files(run, make_state(step), META)
    commit(run, manifest)
    return manifest


def file_of(run: Storage, step: int, name: str) -> Path:
    return Path(run.root) / "checkpoints" / step_name(step) / name


def test_a_checkpoint_does_not_exist_before_its_manifest(run: Storage) -> None:
    manifest = write_files(run, make_state(4), META)
    assert [info.whole for info in list_checkpoints(run)] == [False]
    loaded, damaged = newest_whole(run)
    assert loaded is None
    assert [(d.step, d.unfinished) for d in damaged] == [(4, True)]
    commit(run, Manifest.from_json(manifest.to_json()))
    loaded, damaged = newest_whole(run)
    assert loaded is not None
    assert not damaged
    assert loaded.manifest == manifest
    assert loaded.manifest.meta == META
    assert live_digest(loaded.state.tensors) == live_digest(make_state(4).tensors)


def test_every_dtype_and_shape_comes_back_with_its_strides(run: Storage) -> None:
    base = torch.arange(24.0).reshape(2, 3, 4)
    shared = torch.arange(6.0)
    tensors = {
        "bf16": base.bfloat16(),
        "half": base.half(),
        "zero-dim": torch.tensor(-0.0),
        "empty": torch.zeros(2, 0, 3),
        "transposed": base.permute(2, 0, 1),
        "gaps": torch.arange(8)[::2],
        "bool": torch.tensor([True, False]),
        "unsigned": torch.tensor([2**63], dtype=torch.uint64),
        "complex": torch.complex(base, -base),
        "double complex": torch.complex(base, -base).to(torch.complex128).transpose(0, 2),
        "float8": base.to(torch.float8_e4m3fn),
        "nan": torch.tensor([float("nan"), float("inf")]),
        "part one": shared[:3],
        "part two": shared[3:],
        "all": shared,
    }
    tensors = {f"buffer/{name}": tensor for name, tensor in tensors.items()}
    state = State(step=1, tensors=tensors, values={"extras": {}})
    manifest = write_files(run, state, META)
    commit(run, manifest)
    back, _ = load_checkpoint(run, 1)
    assert live_digest(back.tensors) == live_digest(tensors)
    assert {name: t.stride() for name, t in back.tensors.items()} == {
        name: t.stride() for name, t in tensors.items()
    }
    assert state_sha256(back) == manifest.digest == digest_of(run.root)


def test_any_reader_of_safetensors_sees_plain_shapes(run: Storage) -> None:
    save(run, 1)
    weight = load_file(file_of(run, 1, STATE_FILE))["model/weight"]
    assert torch.equal(weight, make_state(1).tensors["model/weight"])


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("name", [STATE_FILE, "values.json", "manifest.json"])
@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (cut, "is damaged: (cut|not valid JSON)"),
        (empty, "is damaged: zero bytes"),
        (Path.unlink, "missing|no manifest.json: it was never finished"),
        (flip, "is damaged: (SHA-256 is|its own hash|not valid JSON)"),
    ],
)
def test_the_newest_whole_one_is_taken_and_the_damaged_one_named_and_kept(
    run: Storage, name: str, damage: Callable[[Path], object], reason: str
) -> None:
    for step in (1, 2, 3):
        save(run, step)
    for step in (2, 3):
        damage(file_of(run, step, name))
    loaded, damaged = newest_whole(run)
    assert loaded is not None
    assert (loaded.step, [d.step for d in damaged]) == (1, [3, 2])
    for found in damaged:
        assert f"{found.uri}" in found.reason
        assert name in found.reason
        assert re.search(reason, found.reason)
        with pytest.raises(CheckpointError, match=re.escape(found.reason)):
            load_checkpoint(run, found.step)
    left = sorted(os.listdir(file_of(run, 3, "")))
    moved = set_aside(run, damaged[0])
    assert moved == f"{run.uri}/checkpoints/damaged/step-00000003-1"
    assert sorted(os.listdir(moved)) == left
    save(run, 3)
    assert set_aside(run, damaged[0]).endswith("step-00000003-2")
    assert [info.step for info in list_checkpoints(run)] == [1, 2]


def test_none_whole_says_so_for_each(run: Storage) -> None:
    for step in (1, 2):
        save(run, step)
        empty(file_of(run, step, STATE_FILE))
    loaded, damaged = newest_whole(run)
    assert loaded is None
    assert [d.step for d in damaged] == [2, 1]
    with pytest.raises(CheckpointError, match="zero bytes"):
        load_weights(run.root)


def test_only_steps_up_to_a_limit_are_looked_at(run: Storage) -> None:
    for step in (1, 5, 9):
        save(run, step)
    loaded, damaged = newest_whole(run, at_most_step=8)
    assert loaded is not None
    assert (loaded.step, damaged) == (5, [])
    assert newest_whole(run, at_most_step=0) == (None, [])


def test_a_format_of_the_future_is_refused_with_the_one_supported(run: Storage) -> None:
    save(run, 1)
    path = file_of(run, 1, "manifest.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 3}))
    with pytest.raises(
        CheckpointError, match=r"format 3; this version of samestep reads the formats 1, 2"
    ):
        load_checkpoint(run, 1)


def test_a_folder_under_another_steps_name_is_refused(run: Storage) -> None:
    save(run, 1)
    run.rename("checkpoints/step-00000001", "checkpoints/step-00000002")
    with pytest.raises(CheckpointError, match="is that of step 1, not of 2"):
        load_checkpoint(run, 2)


def test_what_an_unfinished_write_left_is_cleared_and_a_whole_one_is_not(run: Storage) -> None:
    run.write("checkpoints/step-00000001/state-00007.safetensors", b"left by another")
    save(run, 1)
    assert sorted(os.listdir(file_of(run, 1, ""))) == [
        "manifest.json", STATE_FILE, "values.json",
    ]  # fmt: skip
    with pytest.raises(CheckpointError, match="exists already and is never overwritten"):
        write_files(run, make_state(1), META)


def test_a_manifest_is_not_committed_without_its_files(run: Storage) -> None:
    manifest = write_files(run, make_state(1), META)
    cut(file_of(run, 1, STATE_FILE))
    with pytest.raises(CheckpointError, match=r"state-00000.safetensors should have .* bytes, has"):
        commit(run, manifest)
    file_of(run, 1, STATE_FILE).unlink()
    with pytest.raises(CheckpointError, match="is missing"):
        commit(run, manifest)
    assert not list_checkpoints(run)[0].whole


def test_retention_keeps_the_newest_and_the_protected(run: Storage) -> None:
    for step in (1, 2, 3, 4, 5):
        save(run, step)
    write_files(run, make_state(6), META)
    assert apply_retention(run, keep=2, protect=[1]) == [2, 3]
    assert [(i.step, i.whole) for i in list_checkpoints(run)] == [
        (1, True), (4, True), (5, True), (6, False),
    ]  # fmt: skip
    assert apply_retention(run, keep=9) == []
    with pytest.raises(ValueError, match="keep=0"):
        apply_retention(run, keep=0)


def test_a_listing_tells_size_and_time(run: Storage) -> None:
    manifest = save(run, 7)
    (info,) = list_checkpoints(run)
    assert info.created_s == 1234.5
    assert info.num_bytes == manifest.num_bytes + file_of(run, 7, "manifest.json").stat().st_size
    assert info.uri == f"{run.uri}/checkpoints/step-00000007"
    empty(file_of(run, 7, "manifest.json"))
    assert list_checkpoints(run)[0].created_s is None


def test_weights_and_digest_are_found_from_run_and_checkpoint(run: Storage) -> None:
    save(run, 1)
    manifest = save(run, 2)
    older = file_of(run, 1, "")
    for path, step in ((run.root, 2), (older, 1), (f"file://{older}", 1)):
        model = nn.Linear(3, 2)
        model.load_state_dict(load_weights(path), strict=True)
        assert torch.equal(model.weight, make_state(step).tensors["model/weight"])
    assert digest_of(Path(run.root)) == manifest.digest != digest_of(older)
    with pytest.raises(CheckpointError, match=r"neither a checkpoint .* nor a run"):
        load_weights(run.root + "/elsewhere")


def test_digests_depend_on_weights_values_and_position() -> None:
    digests = {state_sha256(make_state(step)) for step in (1, 2)}
    moved = make_state(1)
    moved.step = 2
    other = make_state(1)
    other.values["extras"] = {"nominal_weight": 1.0}
    assert len(digests | {state_sha256(moved), state_sha256(other)}) == 4
    assert state_sha256(make_state(1)) in digests


def test_an_object_store_works_as_well() -> None:
    memory, _ = fs.FileSystem.from_uri("mock://")
    run = Storage(root="bucket/run", filesystem=memory, scheme="s3")
    for step in (1, 2, 3):
        save(run, step)
    run.write(f"checkpoints/step-00000003/{STATE_FILE}", b"")
    loaded, damaged = newest_whole(run)
    assert loaded is not None
    assert loaded.step == 2
    assert set_aside(run, damaged[0]) == "s3://bucket/run/checkpoints/damaged/step-00000003-1"
    assert apply_retention(run, keep=1) == [1]
    assert [info.step for info in list_checkpoints(run)] == [2]


def test_names_of_steps_sort_and_come_back() -> None:
    assert step_name(1200) == "step-00001200"
    for step in (0, 99_999_999, 100_000_000):
        assert step_of(step_name(step)) == step
    for name in ("step-1", "step-000000001", "damaged", "step-0000000x", "step-00000001-1"):
        assert step_of(name) is None


WRITER = """
import sys, torch
from samestep.checkpoint.manifest import CheckpointMeta
from samestep.checkpoint.state import State
from samestep.checkpoint.storage import Storage
from samestep.checkpoint.committed import commit
from samestep.checkpoint.writing import write_files
run, step = Storage.at(sys.argv[1]), int(sys.argv[2])
tensors = {f"buffer/{n}": torch.full((1 << 20,), float(n)) for n in range(50)}
print("saving", flush=True)
meta = CheckpointMeta(numerics={}, spec={}, created_s=0.0)
commit(run, write_files(run, State(step=step, tensors=tensors, values={"extras": {}}), meta))
"""


def test_a_kill_in_the_middle_of_a_save_of_200_mb_leaves_the_one_before(
    run: Storage,
) -> None:
    save(run, 1)
    folder = Path(run.root) / "checkpoints" / step_name(2)
    command = [sys.executable, "-c", WRITER, run.root, "2"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"saving\n"
        while process.poll() is None:
            written = sum(file.stat().st_size for file in folder.glob(".*.tmp"))
            if written > 50_000_000:
                break
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    loaded, damaged = newest_whole(run)
    assert loaded is not None
    assert loaded.step == 1
    assert [(d.step, d.unfinished) for d in damaged] == [(2, True)]
    assert list(Path(set_aside(run, damaged[0])).iterdir())
    save(run, 2)
    assert [info.whole for info in list_checkpoints(run)] == [True, True]
