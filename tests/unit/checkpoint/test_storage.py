import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pyarrow import fs

from samestep.checkpoint.storage import Storage
from samestep.errors import StorageError


@pytest.fixture(params=["local", "object store"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "local":
        return Storage.at(str(tmp_path / "run"))
    memory, _ = fs.FileSystem.from_uri("mock://")
    return Storage(root="bucket/run", filesystem=memory, scheme="s3")


def test_what_is_written_is_read_and_replaced(storage: Storage) -> None:
    storage.write("a/b.bin", b"one")
    storage.write("a/b.bin", memoryview(b"two"))
    assert storage.read("a/b.bin") == b"two"
    assert storage.size_bytes("a/b.bin") == 3
    assert storage.exists("a")
    assert storage.exists("a/b.bin")
    assert not storage.exists("a/c.bin")
    assert storage.child("a").read("b.bin") == b"two"


def test_a_folder_lists_its_direct_children_sorted(storage: Storage) -> None:
    for name in ("z", "b/inner", "a", "b/other"):
        storage.write(name, b"12")
    assert storage.list() == ["a", "b", "z"]
    assert storage.list("b") == ["inner", "other"]
    assert storage.list("nowhere") == []
    assert storage.size_bytes() == 8


def test_files_and_folders_move_and_go(storage: Storage) -> None:
    storage.write("from/a/x", b"x")
    storage.write("from/y", b"y")
    storage.rename("from", "deep/to")
    assert storage.read("deep/to/a/x") == b"x"
    assert not storage.exists("from")
    storage.rename("deep/to/y", "y")
    assert storage.read("y") == b"y"
    storage.delete("deep")
    storage.delete("y")
    storage.delete("never there")
    assert storage.list() == []


def test_only_the_first_creates(storage: Storage) -> None:
    assert storage.create_exclusive("lease", b"mine")
    assert not storage.create_exclusive("lease", b"yours")
    assert storage.read("lease") == b"mine"
    assert storage.exclusive_is_best_effort is not storage.is_local


def test_a_missing_file_is_named_with_what_to_do(storage: Storage) -> None:
    with pytest.raises(StorageError, match=r"can't read .*run/gone.*check that"):
        storage.read("gone")
    with pytest.raises(StorageError, match=r"can't move .*run/gone"):
        storage.rename("gone", "elsewhere")


def test_one_of_many_racing_creators_wins(tmp_path: Path) -> None:
    storage = Storage.at(str(tmp_path))
    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(lambda n: storage.create_exclusive("f", b"%d" % n * 99), range(64)))
    winner = won.index(True)
    assert sum(won) == 1
    assert storage.read("f") == b"%d" % winner * 99
    assert os.listdir(tmp_path) == ["f"]


def test_appending_adds_and_an_object_store_refuses(tmp_path: Path) -> None:
    local = Storage.at(str(tmp_path))
    local.append("new/log", b"a\n")
    local.append("new/log", b"b\n")
    assert local.read("new/log") == b"a\nb\n"
    memory, _ = fs.FileSystem.from_uri("mock://")
    with pytest.raises(StorageError, match="can't append to s3://bucket/log"):
        Storage(root="bucket", filesystem=memory, scheme="s3").append("log", b"")


def test_a_failed_write_leaves_the_old_content_and_no_litter(tmp_path: Path) -> None:
    storage = Storage.at(str(tmp_path))
    storage.write("folder/inner", b"kept")
    with pytest.raises(StorageError, match=r"can't write .*folder: "):
        storage.write("folder", b"a folder is in the way")
    assert os.listdir(tmp_path) == ["folder"]
    assert storage.read("folder/inner") == b"kept"


def test_a_file_in_the_way_of_a_folder_is_named(tmp_path: Path) -> None:
    storage = Storage.at(str(tmp_path))
    storage.write("file", b"")
    with pytest.raises(StorageError, match="something else has that name"):
        storage.write("file/inner", b"")


def test_half_written_files_of_a_killed_process_are_not_listed(tmp_path: Path) -> None:
    (tmp_path / ".state.1234-abcd.tmp").write_bytes(b"half")
    (tmp_path / "state").write_bytes(b"whole")
    assert Storage.at(str(tmp_path)).list() == ["state"]


def test_uris_and_paths_open_the_same_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    opened = [Storage.at(text) for text in ("runs", f"{tmp_path}/runs", f"file://{tmp_path}/runs")]
    assert opened[0] == opened[1] == opened[2]
    assert opened[0].local_path == tmp_path / "runs"
    assert Storage.at(opened[0].uri) == opened[0]
    assert pickle.loads(pickle.dumps(opened[0])) == opened[0]


def test_an_s3_uri_keeps_its_endpoint_for_others_to_open() -> None:
    uri = "s3://bucket/runs/a?region=eu-west-1&endpoint_override=localhost:9"
    storage = Storage.at(uri)
    assert storage.uri == uri
    assert not storage.is_local
    assert storage.local_path is None
    assert storage.child("x").uri == uri.replace("runs/a", "runs/a/x")


@pytest.mark.parametrize("uri", ["ftp://host/x", "dbfs://x"])
def test_an_unknown_scheme_is_refused_with_those_allowed(uri: str) -> None:
    with pytest.raises(StorageError, match=r"allowed are a local path, file://, s3://, gs://"):
        Storage.at(uri)


def test_a_file_uri_needs_an_absolute_path() -> None:
    with pytest.raises(StorageError, match=r"no absolute path; write file:///folder"):
        Storage.at("file://runs/a")
