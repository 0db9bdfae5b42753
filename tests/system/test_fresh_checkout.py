"""What the README promises, for a user without rights who has just got the files."""

from __future__ import annotations

import json
import os
import pwd
import re
import shutil
import subprocess
import sys
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
    *("RAY_AUTH_MODE", "RAY_USAGE_STATS_ENABLED", "SAMESTEP_SHARED_MEMORY"),
    *("XDG_CACHE_HOME", "XDG_RUNTIME_DIR"),
}

PROGRAMS = "git|make|mkdir|mlflow|prometheus|ray|samestep"
NOT_RUN = {
    "git clone": "the checkout stands for it",
    ".venv/bin/samestep ui": "does not end by itself; the integration tests start one",
    "prometheus": "does not end by itself; another test here starts one",
    "ray job submit": "needs a cluster; the integration tests start one and submit to it",
}

pytestmark = pytest.mark.timeout(1500)


@dataclass(frozen=True, kw_only=True)
class Checkout:
    """The files of the repository in a folder and with a home of the user's own."""

    folder: Path
    home: Path

    @property
    def bin(self) -> Path:
        """The programs of its virtual environment."""
        return self.folder / ".venv" / "bin"

    def run(self, *command: str, within: str = ".") -> str:
        """Runs a command in the checkout as the user; its output. Fails when the command does."""
        as_user = ["runuser", "-u", USER, "--"] if os.geteuid() == 0 else []
        env = {name: value for name, value in os.environ.items() if name not in NOT_PASSED_ON}
        env["HOME"] = str(self.home)
        if within != ".":
            env["PATH"] = f"{self.bin}:{env['PATH']}"
        result = subprocess.run(
            [*as_user, *command],
            cwd=self.folder / within,
            env=env,
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
    made = Checkout(folder=folder, home=home)
    begin_venv(made)
    yield made
    subprocess.run(["rm", "-rf", str(base)], timeout=300, check=True)


def begin_venv(checkout: Checkout) -> None:
    """Gives the checkout the packages of this environment, all but samestep.

    To install them takes minutes, and is what CI begins with, in a fresh clone. Python is the one
    that the user finds, since this environment's may be in a folder that no other user may enter;
    where there is none of this version, the checkout begins with nothing.
    """
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    checkout.run("bash", "-c", f"{version} -m venv .venv || rm -rf .venv")
    venv, packages = checkout.folder / ".venv", Path("lib", version, "site-packages")
    if not venv.exists():
        return
    shutil.rmtree(venv / packages)
    subprocess.run(["cp", "-a", sys.prefix / packages, venv / packages], timeout=600, check=True)
    for script in Path(sys.prefix, "bin").iterdir():
        is_ours = script.is_file() and not script.is_symlink() and script.name != "samestep"
        if is_ours and not (checkout.bin / script.name).exists():
            content = script.read_bytes().replace(sys.prefix.encode(), str(venv).encode())
            (checkout.bin / script.name).write_bytes(content)
            shutil.copymode(script, checkout.bin / script.name)
    if os.geteuid() == 0:
        subprocess.run(["chown", "-hR", USER, str(venv)], timeout=300, check=True)
    uninstall = [".venv/bin/python", "-m", "pip", "uninstall", "--yes", "-q", "samestep"]
    checkout.run(*uninstall)


def test_make_venv_sets_up_the_command_and_has_nothing_to_do_again(checkout: Checkout) -> None:
    assert not (checkout.bin / "samestep").exists()
    checkout.run("make", "venv")
    version = checkout.run(".venv/bin/python", "-c", "import samestep; print(samestep.__file__)")
    assert version.strip() == str(checkout.folder / "platform" / "samestep" / "__init__.py")
    assert "Nothing to be done" in checkout.run("make", "venv")


def test_make_venv_takes_a_torch_without_cuda(checkout: Checkout) -> None:
    cuda = checkout.run(".venv/bin/python", "-c", "import torch; print(torch.version.cuda)")
    assert cuda.strip() == "None"


def test_make_test_passes_for_a_user_without_rights(checkout: Checkout) -> None:
    # Those that touch files, folders and rights most; the others know little of users.
    checkpoints = ("storage", "checkpoints", "writer", "snapshot")
    places = [f"tests/unit/checkpoint/test_{name}.py" for name in checkpoints]
    output = checkout.run("make", "test", f"TESTS={' '.join(places)} tests/unit/test_scratch.py")
    assert " passed in " in output


def test_the_commands_of_the_readme_do_what_it_says(checkout: Checkout) -> None:
    """Word for word and in its order, as a user without rights."""
    readme = (checkout.folder / "README.md").read_text(encoding="utf-8")
    line = checkout.folder / "line"
    for _, name, text in re.findall(r"```(\w+)\n# (\S+)\n(.*?)```", readme, flags=re.DOTALL):
        line.mkdir(exist_ok=True)
        (line / name).write_text(text, encoding="utf-8")
    if os.geteuid() == 0:
        user = pwd.getpwnam(USER)
        for path in (line, *line.iterdir()):
            os.chown(path, user.pw_uid, user.pw_gid)
    outputs: dict[str, str] = {}
    for command in commands_of(readme):
        reason = next((r for start, r in NOT_RUN.items() if command.startswith(start)), None)
        if reason is None:
            within = "line" if command.startswith("samestep ") else "."
            # A folder of this test's own, which another user's run may have made before.
            told = command.replace("/tmp/marks", str(checkout.home / "marks"))
            outputs[command] = checkout.run("bash", "-c", told, within=within)
    result = json.loads((checkout.folder / "runs" / "digits" / "result.json").read_text())
    assert result["status"] == "done"
    assert result["evaluation"]["accuracy"] >= 0.97
    compared = [text for command, text in outputs.items() if "samestep compare" in command]
    assert len(compared) == 2
    (shown,) = re.findall(r"^```\n(identical through .*\n)```$", readme, flags=re.MULTILINE)
    assert compared == [re.sub(r"[0-9a-f]{16}", result["digest"][:16], shown)] * 2
    crashed = next(text for command, text in outputs.items() if "crash_at" in command)
    (shown,) = re.findall(r"^```\n(\[worker (?:.*\n)*?)```$", readme, flags=re.MULTILINE)
    printed = [regardless_of_the_machine(one) for one in crashed.splitlines()]
    missing = [one for one in shown.splitlines() if regardless_of_the_machine(one) not in printed]
    assert missing == [], crashed
    calm, again = (
        checkout.run(".venv/bin/samestep", "digest", name).split()[0]
        for name in ("calm", "crashed")
    )
    assert calm == again
    assert json.loads((line / "runs" / "line" / "result.json").read_text())["step"] == 80


def regardless_of_the_machine(text: str) -> str:
    """A printed line without its host, process, times and last digits."""
    text = re.sub(r"pid(.)\d+", r"pid\1N", re.sub(r" on \S+ was lost", " on HOST was lost", text))
    # When the fault was noticed is told where somebody saw it who lived on.
    return re.sub(r"\d+\.\d+", "N", re.sub(r"noticed after [\d.]+ s, ", "", text))


def commands_of(text: str) -> list[str]:
    """The lines of the indented blocks that begin with a program; continued ones joined."""
    blocks = re.findall(r"(?:^    .*\n)+", text, flags=re.MULTILINE)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line.strip() for line in lines if re.match(r"    \S*\b(" + PROGRAMS + r")\b ", line)]
