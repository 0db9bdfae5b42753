"""Every command that a page shows is run: here, or by the test that is named beside the reason.

The table is held against the pages in both directions. Runs are of mode local, MLflow and metrics
are off and long jobs are cut short: those are the options that a command is `given` here.
"""

from __future__ import annotations

import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

from samestep.cli.main import app

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("dashboards", "deploy", "docs", "platform", "tests", "workloads")
FRESH = "tests/system/test_fresh_checkout.py"

INCIDENT = "non_finite-step-00000020-attempt-1"
# Other placeholders (RUN, BUNDLE, FILE, ...) are names that runs and files may have, and have here.
FILLED = {"ID": INCIDENT, "STEP": "12", "N": "5", "A:B": "3:5", "@NAME@": "flowers"}
LOCAL = "--mode local --set tracking.enabled=false --set metrics.enabled=false"
SMALL = f"{LOCAL} --set max_steps=2 --set args.width=32 --set args.depth=1"
SHORT = f"{LOCAL} --set epochs=1"
TEMPLATE = "platform/samestep/cli/templates/README.md.txt"


@dataclass(frozen=True, kw_only=True)
class Here:
    """A command that is run here, and a regular expression that is found in what it prints.

    `given` are options beside its own. One that `dies` takes its process with it; what it prints
    when it is repeated, in this one, is `again`.
    """

    prints: str
    given: str = ""
    status: int | None = 0
    dies: bool = False
    again: str | None = None


@dataclass(frozen=True)
class Elsewhere:
    """Why a command is not run here, and `file::text`: where it is run."""

    reason: str
    by: str


README = Elsewhere(
    "run word for word by a user who has just got the files",
    f"{FRESH}::test_the_commands_of_the_readme_do_what_it_says",
)
WINE = Elsewhere(
    "run with the files of its page",
    "tests/unit/test_docs.py::test_the_plain_loop_and_the_workload_learn_the_same_thing",
)
PROMETHEUS = Elsewhere(
    "does not end by itself, and needs Debian's package",
    "tests/system/test_prometheus.py::test_every_query_of_every_panel_returns_data",
)
SUBMIT = Elsewhere(
    "needs a cluster",
    "tests/integration/test_submitted_job.py::"
    "test_a_job_is_refused_relative_storage_then_trains_is_attached_to_stopped_and_resumed",
)
SUBMITTED = (
    "ray job submit --address http://HEAD:8265 --working-dir . --runtime-env "
    "deploy/runtime_env.yaml -- python -m samestep train workloads/digits/job.yaml --name digits "
    "--set storage=/shared/runs"
)
TRAINED = r"status +done\n"
SAME_STEP = r"reproduced bit for bit: step 20 \(loss nan, grad_norm nan, left out\)"

COMMANDS: dict[str, dict[str, Here | Elsewhere]] = {
    "CONTRIBUTING.md": {
        "make venv": Elsewhere(
            "takes minutes and the network",
            f"{FRESH}::test_make_venv_sets_up_the_command_and_has_nothing_to_do_again",
        ),
        "make lint": Elsewhere("takes a minute; CI runs it", ".ci/run::step make lint"),
        "make test": Elsewhere(
            "would run this test", f"{FRESH}::test_make_test_passes_for_a_user_without_rights"
        ),
        "make fmt": Elsewhere(
            "changes the checkout; what it makes anew is compared",
            "tests/unit/test_dashboards.py::test_the_files_are_what_the_script_makes",
        ),
        ".ci/run": Elsewhere("would run this test", ".ci/run::step make test"),
    },
    "README.md": {
        "git clone REPOSITORY samestep && cd samestep": Elsewhere(
            "copies of the files stand for it", f"{FRESH}::def checkout"
        ),
        "make train": README,
        ".venv/bin/samestep train workloads/digits/job.yaml --name one --workers 1": README,
        ".venv/bin/samestep train workloads/digits/job.yaml --name actor --mode dataparallel": (
            README
        ),
        ".venv/bin/samestep compare digits one": README,
        ".venv/bin/samestep compare digits actor": README,
        "mkdir -p /tmp/marks": README,
        ".venv/bin/samestep train workloads/faulty/job.yaml --name calm --mode local": README,
        ".venv/bin/samestep train workloads/faulty/job.yaml --name crashed --workers 2 "
        "--set args.crash_at=40 --set args.marker=/tmp/marks": README,
        ".venv/bin/samestep train workloads/faulty/job.yaml --name nan --workers 3 "
        "--set args.nan_at=20 --set args.position=9 --set incidents.non_finite=skip": Here(
            given=LOCAL, prints=rf"incident {INCIDENT}: step 20: loss nan, grad_norm nan\n"
        ),
        f".venv/bin/samestep pack nan {INCIDENT} --out nan.zip": Here(
            prints=r"^nan\.zip: non_finite at step 20, "
        ),
        ".venv/bin/samestep replay nan.zip --code workloads/faulty --report page.html": Here(
            prints=SAME_STEP
        ),
        "samestep check job.yaml": README,
        "samestep train job.yaml": README,
        ".venv/bin/samestep watch digits": Here(prints=r"^digits  done  attempt 1, local, "),
        ".venv/bin/samestep ui": Elsewhere(
            "does not end by itself",
            "tests/integration/test_tracking.py::"
            "test_the_ui_shows_the_runs_until_a_signal_and_leaves_nothing_behind",
        ),
        "prometheus --config.file=dashboards/prometheus/prometheus.yml": PROMETHEUS,
        SUBMITTED: SUBMIT,
    },
    "dashboards/README.md": {
        "prometheus --config.file=dashboards/prometheus/prometheus.yml": PROMETHEUS,
    },
    "deploy/README.md": {
        "export RAY_AUTH_MODE=token RAY_AUTH_TOKEN=...": SUBMIT,
        SUBMITTED: SUBMIT,
    },
    "docs/bundles.md": {
        "samestep incidents list RUN": Here(prints=rf"\n{INCIDENT} +non_finite +20 .* MB "),
        "samestep incidents show RUN ID": Here(
            prints=rf"\nbundle: \S+/{INCIDENT}\n(.*\n)* +state after 20 steps \(live\)\n"
        ),
        "samestep pack RUN ID --out FILE": Here(prints=r"^FILE: non_finite at step 20, "),
        "samestep pack FOLDER --out FILE": Here(prints=r"^FILE: non_finite at step 20, "),
    },
    "docs/checkpoints.md": {
        "samestep checkpoints RUN": Here(
            prints=r"^step +size +age +status +which *\n(.*\n)* *112 .* whole +latest"
        ),
        "samestep checkpoints RUN --verify": Here(prints=r"\n *112 .* whole +latest"),
        "samestep export RUN --out F": Here(prints=r"^F: weights after 112 steps, 6 tensors, "),
    },
    "docs/faults.md": {
        "samestep drill workloads/faulty/job.yaml --faults faults.yaml --nodes 3 "
        "--set args.pause_s=0.05": Elsewhere(
            "needs a minute and nodes of Ray; a drill of random faults is run on three",
            "tests/chaos/test_random_faults.py::test_random_faults_change_no_bit",
        ),
    },
    "docs/incidents.md": {
        "samestep fork RUN --at 80 --name NEW --skip-steps 80:101 --set clip_norm=1": Here(
            prints=r"^NEW: forked from \S+/RUN after 80 steps\n(.*\n)*"
            r"train it on with:\n  \S.* train job\.yaml --name NEW "
        ),
    },
    "docs/replay.md": {
        "samestep incidents list RUN": Here(prints=rf"\n{INCIDENT} +non_finite +20 "),
        "samestep replay RUN ID": Here(prints=SAME_STEP),
        "samestep replay BUNDLE": Here(prints=SAME_STEP),
        "samestep replay RUN --at STEP": Here(prints=r"^reproduced bit for bit: step 12 \(loss 0"),
        "samestep bisect RUN_A RUN_B": Here(
            status=11,
            prints=r"^first difference at step 0: lr(.*\n)*first tensor that differs: model/0",
        ),
    },
    "docs/workload.md": {
        "samestep check job.yaml": WINE,
        "samestep train job.yaml --name wine --mode local": WINE,
        "samestep show wine": WINE,
        "samestep train job.yaml --name four --workers 4": WINE,
        "samestep compare wine four": WINE,
        "samestep evaluate wine --checkpoint best": WINE,
    },
    TEMPLATE: {
        "@COMMAND@ check job.yaml": Here(prints=r"fine: the dry step found no obstacle\n"),
        "@COMMAND@ train job.yaml": Here(given=SHORT, prints=TRAINED),
        "@COMMAND@ evaluate @NAME@": Here(prints=r"equal bit for bit to the evaluation in the le"),
        "@COMMAND@ train job.yaml --name one --workers 1": Here(given=SHORT, prints=TRAINED),
        "@COMMAND@ train job.yaml --name two --workers 2": Here(given=SHORT, prints=TRAINED),
        "@COMMAND@ compare one two": Here(prints=r"^identical through step 14 "),
    },
    "workloads/chargpt/README.md": {
        # Another release of Python may have another text, which is refused.
        "samestep train workloads/chargpt/job.yaml": Here(
            given=SMALL, status=None, prints=rf"{TRAINED}|args\.sha256 is 2432f3"
        ),
        "samestep train workloads/chargpt/job.yaml --set args.sha256=null": Here(
            given=f"{SMALL} --name other", prints=r"library has sha256 [0-9a-f]{64}\n"
        ),
    },
    "workloads/digits/README.md": {
        "samestep train workloads/digits/job.yaml": Here(given=SHORT, prints=TRAINED),
        "samestep train workloads/digits/job.yaml --name a --workers 1": Here(
            given=SHORT, prints=TRAINED
        ),
        "samestep train workloads/digits/job.yaml --name b --workers 3": Here(
            given=SHORT, prints=TRAINED
        ),
        "samestep compare a b": Here(prints=r"^identical through step 22 "),
    },
    "workloads/faulty/README.md": {
        "samestep train workloads/faulty/job.yaml --name calm": Here(
            given=LOCAL, prints=rf"{TRAINED}steps +64\ntest squared_error +0\.0[0-4]\d+\n"
        ),
        # In mode local the crash is the command's own.
        "samestep train workloads/faulty/job.yaml --name crash --workers 2 --set args.crash_at=20 "
        "--set args.position=15 --set args.marker=/tmp/faulty-crash": Here(
            given=LOCAL,
            dies=True,
            status=-signal.SIGKILL,
            prints=r"faulty: crash at step 20, pid \d+\n",
            again=rf"attempt 2 starts at step 20: (.*\n)*{TRAINED}steps +64\n",
        ),
    },
}

# Blocks that are fenced. What is written in a language is a file or a script; the rest is output.
WRITTEN = {
    "README.md": "tests/unit/test_readme.py::test_a_script_trains_the_example_of_the_readme",
    "docs/faults.md": (
        "tests/unit/cluster/test_strikes.py::test_the_faults_file_of_the_documents_is_read"
    ),
    "docs/workload.md": WINE.by,
}
SHOWN = {
    "identical through step 344 ": README.by,
    "[worker pid=18433] faulty: crash at step 40, ": README.by,
    "reproduced bit for bit: step 20 ": (
        "tests/unit/test_shown_commands.py::test_the_readme_shows_what_replay_prints"
    ),
    "digits  interrupted  attempt 3, ": (
        "tests/unit/test_shown_commands.py::test_the_readme_shows_what_watch_prints"
    ),
}

pytestmark = pytest.mark.timeout(400)

BLOCK = re.compile(
    r"^ *(?P<fence>```|~~~)(?P<language>[^\n]*)\n(?P<fenced>.*?)^ *(?P=fence)$"
    r"|(?P<indented>(?:^(?: {4}|\t)[^\n]*\n?)+)",
    flags=re.MULTILINE | re.DOTALL,
)
SHELLS = ("bash", "console", "sh", "shell")


@dataclass(frozen=True, kw_only=True)
class Block:
    """A block of a page; `language` is None where it is indented, not fenced."""

    page: str
    language: str | None
    text: str

    @property
    def is_tree(self) -> bool:
        """Folders and files: it begins with a folder."""
        return self.language is None and self.text.split()[0].endswith("/")

    @property
    def commands(self) -> list[str]:
        """Its lines, continued ones joined, without remarks; none where it is no shell's."""
        if self.is_tree or self.language not in (None, *SHELLS):
            return []
        lines = re.sub(r"\\\n", " ", self.text).splitlines()
        return [" ".join(re.sub(r"(^|\s)# .*", "", line).split()) for line in lines if line.strip()]


def blocks_of(page: str, text: str) -> list[Block]:
    return [
        Block(
            page=page,
            language=None if found["fenced"] is None else found["language"].strip(),
            text=found["fenced"] or found["indented"],
        )
        for found in BLOCK.finditer(text)
    ]


def pages() -> dict[str, str]:
    paths = list(ROOT.glob("*.md"))
    for folder in FOLDERS:
        paths += [*(ROOT / folder).rglob("*.md"), *(ROOT / folder).rglob("*.md.txt")]
    names = {path: path.relative_to(ROOT) for path in sorted(paths)}
    return {
        str(name): path.read_text(encoding="utf-8")
        for path, name in names.items()
        if not any(part.startswith(".") or part == "runs" for part in name.parts)
    }


PAGES = pages()
BLOCKS = [block for page, text in PAGES.items() for block in blocks_of(page, text)]


def test_every_command_of_every_page_is_run_or_says_why_not() -> None:
    shown = {(block.page, line) for block in BLOCKS for line in block.commands}
    listed = {(page, line) for page, lines in COMMANDS.items() for line in lines}
    assert sorted(shown - listed) == [], "give these a place in COMMANDS"
    assert sorted(listed - shown) == [], "no page has these any more"


def test_every_fenced_block_is_a_command_or_is_used_by_a_test() -> None:
    fenced = [block for block in BLOCKS if block.language not in (None, *SHELLS)]
    assert {block.page for block in fenced if block.language} == set(WRITTEN)
    assert {block.language for block in fenced} == {"", "python", "yaml"}
    outputs = [block.text for block in fenced if not block.language]
    begun = [[start for start in SHOWN if text.startswith(start)] for text in outputs]
    assert [len(starts) for starts in begun] == [1] * len(outputs)
    assert sorted(start for starts in begun for start in starts) == sorted(SHOWN)


def test_the_tests_that_are_named_exist() -> None:
    listed = (how for lines in COMMANDS.values() for how in lines.values())
    named = [how.by for how in listed if isinstance(how, Elsewhere)]
    for by in (*named, *WRITTEN.values(), *SHOWN.values()):
        file, _, text = by.partition("::")
        wanted = f"\ndef {text}(" if text.startswith("test_") else text
        assert wanted in (ROOT / file).read_text(encoding="utf-8"), f"{file} has no {text}"


def test_a_fresh_checkout_runs_what_is_left_to_it() -> None:
    found = runpy.run_path(str(ROOT / FRESH))
    commands = [" ".join(line.split()) for line in found["commands_of"](PAGES["README.md"])]
    run = {line for line in commands if not line.startswith(tuple(found["NOT_RUN"]))}
    assert {line for line, how in COMMANDS["README.md"].items() if how is README} <= run


def test_commands_are_found_however_a_block_is_written() -> None:
    indented = "Text\n\n    a b  # why\n    c \\\n        --d\n\nText\n\n    tree/\n      file\n"
    text = indented + "\n\te\n\n```sh\nf\n```\n~~~\noutput\n~~~\n"
    found = [block.commands for block in blocks_of("page.md", text)]
    assert found == [["a b", "c --d"], [], ["e"], ["f"], []]


def words_of(command: str) -> list[str]:
    return [FILLED.get(word, word) for word in shlex.split(command)]


@pytest.mark.parametrize("page", PAGES)
def test_no_page_names_a_command_or_an_option_that_samestep_does_not_have(page: str) -> None:
    """In its text as well as in its blocks, and those that are run elsewhere too."""
    found = re.findall(r"`samestep ([a-z][^`]*)`", PAGES[page].replace("\n", " "))
    lines = "\n".join(line for block in BLOCKS if block.page == page for line in block.commands)
    found += re.findall(r"(?:^|\s)(?:\S*/)?samestep ([a-z].*)", lines)
    for text in found:
        words = words_of(text)
        names = 2 if words[0] == "incidents" else 1
        # Options are read before the help is shown, and nothing is run.
        told = CliRunner().invoke(app, [*words[:names], "--help", *words[names:]])
        assert told.exit_code == 0 or "requires an argument" in told.output, told.output


def run(words: Sequence[str], how: Here) -> str:
    """Runs a command of samestep; what it prints, to both streams."""
    words = [*words, *shlex.split(how.given)]
    if how.dies:
        done = subprocess.run(
            [sys.executable, "-m", "samestep", *words],
            env={**os.environ, "PYTHONPATH": str(ROOT / "platform")},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=240,
            check=False,
        )
        status, output = done.returncode, done.stdout
    else:
        result = CliRunner().invoke(app, words)
        status, output = result.exit_code, result.output
    assert how.status in (None, status), f"{words} ended with {status}:\n{output}"
    assert re.search(how.prints, output), f"{words} printed\n{output}"
    if how.again is not None:
        run(words, Here(prints=how.again))
    return output


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a job and what the pages call RUN, RUN_A, RUN_B, BUNDLE and FOLDER."""
    folder = tmp_path_factory.mktemp("job")
    for name in ("faulty.py", "job.yaml"):
        shutil.copy(ROOT / "workloads" / "faulty" / name, folder)
    planted = "--set args.nan_at=20 --set args.position=9 --set incidents.non_finite=skip"
    options = {
        # Seven epochs have the 101 steps that docs/incidents.md forks at.
        "RUN": f"{planted} --set epochs=7 --set incidents.bundle.code=true",
        "RUN_A": "--set max_steps=4 --set epochs=null",
        "RUN_B": "--set max_steps=4 --set epochs=null --set args.lr=0.02",
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(sys, "path", list(sys.path))
        for name, given in options.items():
            how = Here(given=f"{given} {LOCAL}", prints=TRAINED)
            run(["train", "job.yaml", "--name", name], how)
    for name in ("BUNDLE", "FOLDER"):
        shutil.copytree(folder / "runs" / "RUN" / "incidents" / INCIDENT, folder / name)
    return folder


@pytest.fixture(scope="module")
def printed(job: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, str]]:
    """What the commands of a page print that are run here, in their order, by the page's lines."""
    known: dict[str, dict[str, str]] = {}

    def of(page: str) -> dict[str, str]:
        if page not in known:
            with pytest.MonkeyPatch.context() as patch:
                patch.chdir(folder_for(page, job, tmp_path_factory))
                patch.setattr(sys, "path", list(sys.path))
                patch.setenv("COLUMNS", "100")
                known[page] = {
                    line: run(arguments(line), how)
                    for line, how in COMMANDS[page].items()
                    if isinstance(how, Here)
                }
        return known[page]

    return of


def folder_for(page: str, job: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which a page's commands are run, with what they find there."""
    if page.startswith("docs/"):
        return job
    folder = tmp_path_factory.mktemp("checkout")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        if page == TEMPLATE:
            run(["init", FILLED["@NAME@"]], Here(prints="README.md"))
            return folder / FILLED["@NAME@"]
        shutil.copytree(ROOT / "workloads", folder / "workloads")
        if page == "README.md":  # `make train` has run
            run(["train", "workloads/digits/job.yaml"], Here(given=SHORT, prints=TRAINED))
    return folder


def arguments(line: str) -> list[str]:
    """Of a page's line, after the program; files that it writes are not there yet."""
    words = words_of(line)[1:]
    if "--out" in words:
        Path(words[words.index("--out") + 1]).unlink(missing_ok=True)
    return [word.replace("=/tmp/", f"={Path.cwd()}/") for word in words]


RUN_HERE = [
    page for page, lines in COMMANDS.items() if any(isinstance(how, Here) for how in lines.values())
]


@pytest.mark.parametrize("page", RUN_HERE)
def test_the_commands_of_a_page_do_what_it_says(
    page: str, printed: Callable[[str], dict[str, str]]
) -> None:
    assert printed(page)


def shown(start: str) -> str:
    """The output that the README shows and that begins so."""
    (text,) = [block.text for block in BLOCKS if block.text.startswith(start)]
    return text


def test_the_readme_shows_what_replay_prints(printed: Callable[[str], dict[str, str]]) -> None:
    (output,) = [text for line, text in printed("README.md").items() if " replay " in line]
    assert sorted(output.splitlines()) == sorted(shown("reproduced bit for bit: ").splitlines())


def test_the_readme_shows_what_watch_prints(printed: Callable[[str], dict[str, str]]) -> None:
    """Of another run, so its headings alone are compared."""
    output = printed("README.md")[".venv/bin/samestep watch digits"]

    def headings(text: str) -> set[str]:
        below = text.partition("\n")[2]
        return set(re.findall(r"(?:^|  )([a-z][a-z/ ]*?) [-\d]", below, flags=re.MULTILINE))

    assert headings(output) == headings(shown("digits  interrupted"))
    parts = re.compile(r"■ (\w+) +\d+:\d\d \(\d+%\)")
    assert set(parts.findall(output)) <= set(parts.findall(shown("digits  interrupted")))
    assert len(set(parts.findall(output))) >= 3


def tree(first: str) -> set[str]:
    """The paths of the tree that begins with a folder, relative to it; without their remarks."""
    (block,) = [one for one in BLOCKS if one.is_tree and one.text.split()[0].startswith(first)]
    found, folders = set(), [""]
    for line in block.text.splitlines()[1:]:
        depth = (len(line) - len(line.lstrip()) - 4) // 2
        name = line.split()[0]
        del folders[depth:]
        found.add("".join(folders) + name)
        if name.endswith("/"):
            folders.append(name)
    return found


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_a_bundle_and_a_checkpoint_hold_what_their_pages_draw(job: Path) -> None:
    drawn = {path.replace("00000412", "00000020") for path in tree("incidents/")}
    bundle = files(job / "BUNDLE")
    within = [path for path in drawn if path.endswith("/")]
    assert {path for path in bundle if not path.startswith(tuple(within))} == {
        path for path in drawn if path not in within
    }
    assert all(any(file.startswith(path) for file in bundle) for path in within)
    (checkpoint,) = (job / "runs" / "RUN" / "checkpoints").glob("*112")
    parts = {re.sub(r"-0000[01]\.", "-0000x.", path) for path in tree("checkpoints/")}
    assert {re.sub(r"-00000\.", "-0000x.", path) for path in files(checkpoint)} == parts


def test_the_readmes_tree_is_that_of_the_repository() -> None:
    (block,) = [one for one in BLOCKS if one.page == "README.md" and one.is_tree]
    lines = (re.split(r"\s{2,}", line.strip())[0] for line in block.text.splitlines())
    names = [name for line in lines for name in line.split(", ")]
    assert len(names) >= 9
    assert [name for name in names if not (ROOT / name).exists()] == []
