"""What the README promises, for a user without rights who has just got the files."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
USER = "nobody"
# What an outer make, a virtual environment or the tests' own settings would pass on.
NOT_PASSED_ON = {
    *("ARGS", "JOB", "TESTS", "MAKEFLAGS", "MAKELEVEL", "MFLAGS", "PYTHONPATH", "VIRTUAL_ENV"),
    *("RAY_AUTH_MODE", "RAY_USAGE_STATS_ENABLED", "XDG_CACHE_HOME", "XDG_RUNTIME_DIR"),
}

pytestmark = pytest.mark.timeout(1500)


@dataclass(frozen=True, kw_only=True)
class Checkout:
    """The files of the repository in a folder and with a home of the user's own."""

    folder: Path
    home: Path

    def run(self, *command: str) -> str:
        """Runs a command in the checkout as the user; its output. Fails when the command does."""
        as_user = ["runuser", "-u", USER, "--"] if os.geteuid() == 0 else []
        env = {name: value for name, value in os.environ.items() if name not in NOT_PASSED_ON}
        result = subprocess.run(
            [*as_user, *command],
            cwd=self.folder,
            env={**env, "HOME": str(self.home)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=1400,
            check=False,
        )
        assert result.returncode == 0, f"{command} ended with {result.returncode}:\n{result.stdout}"
        return result.stdout


def files_of_the_repository() -> list[str]:
    listing = subprocess.run(
        ["git", "-c", "safe.directory=*", "ls-files", "-z", "-co", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return [name for name in listing.stdout.split("\0") if name and (ROOT / name).is_file()]


@pytest.fixture(scope="module")
def checkout() -> Iterator[Checkout]:
    # Not pytest's tmp_path, which no other user may enter.
    base = Path(tempfile.mkdtemp(prefix="samestep-checkout-"))
    base.chmod(0o755)
    folder, home = base / "samestep", base / "home"
    home.mkdir()
    for name in files_of_the_repository():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / name)
    if os.geteuid() == 0:
        user = pwd.getpwnam(USER)
        for path in (base, *base.rglob("*")):
            os.chown(path, user.pw_uid, user.pw_gid)
    yield Checkout(folder=folder, home=home)
    shutil.rmtree(base)


def test_make_venv_sets_up_the_command_and_has_nothing_to_do_again(checkout: Checkout) -> None:
    checkout.run("make", "venv")
    version = checkout.run(".venv/bin/python", "-c", "import samestep; print(samestep.__file__)")
    assert version.strip() == str(checkout.folder / "platform" / "samestep" / "__init__.py")
    assert "Nothing to be done" in checkout.run("make", "venv")


def test_make_venv_takes_a_torch_without_cuda(checkout: Checkout) -> None:
    cuda = checkout.run(".venv/bin/python", "-c", "import torch; print(torch.version.cuda)")
    assert cuda.strip() == "None"


def test_make_test_passes_for_a_user_without_rights(checkout: Checkout) -> None:
    output = checkout.run("make", "test", "TESTS=tests/unit")
    assert " passed in " in output


def test_make_train_trains_for_a_user_without_rights(checkout: Checkout) -> None:
    checkout.run("make", "train", "ARGS=--name first --set epochs=1")
    result = json.loads((checkout.folder / "runs" / "first" / "result.json").read_text())
    assert result["status"] == "done"
