from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"
LEAKS = {
    "environment variable SAMESTEP_LEAKED": """
        os.environ["SAMESTEP_LEAKED"] = "1"
    """,
    "environment variable HOME": """
        del os.environ["HOME"]
    """,
    "process": """
        subprocess.Popen(["sleep", "600"])
    """,
    "process whose parent has ended": """
        subprocess.run(["sh", "-c", "sleep 600 >/dev/null 2>&1 &"], check=True)
    """,
    "thread samestep-leaked": """
        threading.Thread(target=threading.Event().wait, name="samestep-leaked", daemon=True).start()
    """,
}


def run_pytest(folder: Path, body: str) -> subprocess.CompletedProcess[str]:
    conftest = CONFTEST.read_text().replace("GRACE_S = 10.0", "GRACE_S = 0.5")
    (folder / "conftest.py").write_text(conftest)
    (folder / "test_it.py").write_text(
        f"import os, subprocess, threading\n\ndef test_leaking():\n{body}\n\n"
        "def test_after_it():\n    assert 'HOME' in os.environ\n"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py"]
    return subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("leak", LEAKS)
def test_a_test_that_leaks_fails_and_the_next_one_does_not(leak: str, tmp_path: Path) -> None:
    result = run_pytest(tmp_path, LEAKS[leak])
    assert result.returncode == 1, result.stdout + result.stderr
    assert "the test leaked:\n  " + leak.split(" whose")[0] in result.stdout.replace("E   ", "")
    assert "2 passed, 1 error" in result.stdout


def test_a_test_that_cleans_up_passes(tmp_path: Path) -> None:
    result = run_pytest(
        tmp_path,
        """
        os.environ["SAMESTEP_LEAKED"] = "1"
        del os.environ["SAMESTEP_LEAKED"]
        subprocess.run(["true"], check=True)
        """,
    )
    assert result.returncode == 0, result.stdout + result.stderr
