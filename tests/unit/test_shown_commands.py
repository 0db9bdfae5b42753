"""Every command that a page shows is run: here, or by the test that is named beside the reason.

The table, in shown_commands.py, is held against the pages in both directions.
"""

from __future__ import annotations

import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from typer.testing import CliRunner

# Test modules share the module beside this one.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from shown_commands import (
    COMMANDS,
    FILLED,
    FRESH,
    INCIDENT,
    LOCAL,
    README,
    SHORT,
    SHOWN,
    TEMPLATE,
    TRAINED,
    WRITTEN,
    Elsewhere,
    Here,
)

from samestep.cli.main import app

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("dashboards", "deploy", "docs", "platform", "tests", "workloads")

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
