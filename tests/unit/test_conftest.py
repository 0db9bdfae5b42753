from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"
TESTS = """
import os, subprocess, threading

def test_that_sets_a_variable():
    os.environ["SAMESTEP_LEAKED"] = "1"

def test_that_removes_a_variable():
    del os.environ["HOME"]

def test_that_leaves_a_child():
    subprocess.Popen(["sleep", "601"])

def test_that_leaves_a_process_whose_parent_has_ended():
    subprocess.run(["sh", "-c", "sleep 602 >/dev/null 2>&1 &"], check=True)

def test_that_leaves_a_thread():
    threading.Thread(target=threading.Event().wait, name="samestep-x", daemon=True).start()

def test_that_leaves_shared_memory():
    os.mkdir(os.path.join(os.environ["SAMESTEP_SHARED_MEMORY"], "samestep-x"))

def test_that_cleans_up():
    assert "HOME" in os.environ and "SAMESTEP_LEAKED" not in os.environ
    os.environ["SAMESTEP_LEAKED"] = "1"
    del os.environ["SAMESTEP_LEAKED"]
    subprocess.run(["true"], check=True)
"""


@pytest.fixture(scope="module")
def output(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("leaks")
    conftest = CONFTEST.read_text().replace("GRACE_S = 10.0", "GRACE_S = 0.2")
    (folder / "conftest.py").write_text(conftest)
    (folder / "test_it.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", "test_it.py"]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=60, check=False
    ).stdout


@pytest.mark.parametrize(
    ("test", "leak"),
    [
        ("sets_a_variable", "environment variable SAMESTEP_LEAKED: None before, '1' after"),
        ("removes_a_variable", "environment variable HOME: "),
        ("leaves_a_child", "sleep 601"),
        ("leaves_a_process_whose_parent_has_ended", "sleep 602"),
        ("leaves_a_thread", "thread samestep-x"),
        ("leaves_shared_memory", "shared memory samestep-x"),
    ],
)
def test_a_test_that_leaks_fails_and_says_what(output: str, test: str, leak: str) -> None:
    assert f"ERROR test_it.py::test_that_{test}" in output
    assert leak in output.split(f"ERROR at teardown of test_that_{test} ")[1].split("ERROR at")[0]


def test_a_test_that_cleans_up_passes_after_those_that_do_not(output: str) -> None:
    assert "PASSED test_it.py::test_that_cleans_up" in output
    assert "7 passed, 6 errors" in output
