"""Where a workload reads and writes, whatever the working directory is."""

from __future__ import annotations

import gc
import sys
from pathlib import Path

import pytest

from samestep.errors import WorkloadError
from samestep.workload import Workload, load_workload

CODE = """
import samestep

class Reads(samestep.Workload):
    def __init__(self):
        self.text = (self.folder / "data" / "d.txt").read_text()
        (self.output_folder / "out.txt").write_text("mine")

class Own(samestep.Workload):
    def __init__(self):
        self.folder = "my own"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "reads", raising=False)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "d.txt").write_text("seven")
    (tmp_path / "reads.py").write_text(CODE)
    return tmp_path


def test_a_workload_reads_beside_its_module_and_writes_to_its_workers_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir("/")
    outputs = folder / "run" / "outputs" / "worker-0"
    workload = load_workload("reads:Reads", {}, [folder], output_folder=outputs)
    assert vars(workload)["text"] == "seven"
    assert (outputs / "out.txt").read_text() == "mine"


def test_without_a_run_the_output_folder_is_a_temporary_one(folder: Path) -> None:
    workload = load_workload("reads:Reads", {}, [folder])
    outputs = workload.output_folder
    assert (outputs / "out.txt").read_text() == "mine"
    del workload
    gc.collect()
    assert not outputs.exists()


def test_a_workload_may_use_the_name_for_something_of_its_own(folder: Path) -> None:
    workload: Workload = load_workload("reads:Own", {}, [folder])
    assert vars(workload)["folder"] == "my own"


def test_a_workload_that_is_nowhere_says_where_it_was_looked_for(folder: Path) -> None:
    beside = folder / "beside"
    with pytest.raises(WorkloadError) as caught:
        load_workload("nowhere_at_all:Thing", {}, [folder, beside])
    told = f"no module 'nowhere_at_all'; looked in {folder}, {beside} and among the installed"
    assert told in str(caught.value)


def test_an_import_that_fails_shows_the_users_own_traceback(folder: Path) -> None:
    (folder / "reads.py").write_text("import math\n\nLIMIT = math.nothing_of_this_name\n")
    with pytest.raises(WorkloadError) as caught:
        load_workload("reads:Reads", {}, [folder])
    assert f'File "{folder}/reads.py", line 3' in str(caught.value)
    assert "LIMIT = math.nothing_of_this_name" in str(caught.value)
    assert "has no attribute 'nothing_of_this_name'" in str(caught.value)


def test_a_file_not_found_by_a_relative_path_says_where_it_was_looked_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "reads.py").write_text(CODE.replace('(self.folder / "data" / "d.txt")', "open('d')"))
    monkeypatch.chdir("/")
    with pytest.raises(WorkloadError) as caught:
        load_workload("reads:Reads", {}, [folder])
    assert "No such file or directory: 'd'" in str(caught.value)
    assert "from the working directory (/)" in str(caught.value)
    assert "self.folder / 'd'" in str(caught.value)
