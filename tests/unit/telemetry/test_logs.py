"""What workers print, log and write is kept with the run."""

from __future__ import annotations

import logging
import os
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from pyarrow import fs

from samestep.checkpoint.storage import Storage
from samestep.telemetry.logs import MAX_LINE, LineFile, log_name, worker_files

NAME = "logs/attempt-00002/worker-1.log"


@pytest.fixture
def run(tmp_path: Path) -> Storage:
    return Storage.at(str(tmp_path / "run"))


@contextmanager
def as_in_a_plain_program() -> Iterator[logging.Logger]:
    """A logger with none of pytest's handlers above it."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers[:] = []
    root.setLevel(logging.WARNING)
    try:
        yield logging.getLogger("somebody")
        assert root.handlers == []
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


def say(text: str) -> None:
    """As print does."""
    sys.stdout.write(text)
    sys.stdout.write("\n")


def kept(run: Storage) -> list[str]:
    """The lines of the log, without the first, which names the process, and without times."""
    first, *lines = run.read(NAME).decode().splitlines()
    assert f"process {os.getpid()} on" in first
    return [line[20:] if line[:2] == "20" else line for line in lines]


def test_the_name_tells_attempt_and_worker() -> None:
    assert log_name(2, 1) == NAME


def test_prints_go_on_to_the_screen_and_are_kept(
    run: Storage, capsys: pytest.CaptureFixture[str]
) -> None:
    with worker_files(run, attempt=2, world_rank=1):
        sys.stdout.write("one ")
        say("two")
        sys.stderr.writelines(["three\n", "half"])
        assert kept(run) == ["one two", "three"]
    assert kept(run) == ["one two", "three", "half"]
    shown = capsys.readouterr()
    assert (shown.out, shown.err) == ("one two\n", "three\nhalf")
    say("afterwards")
    assert kept(run)[-1] == "half"


def test_a_second_start_of_the_attempt_goes_on_in_the_same_file(run: Storage) -> None:
    for text in ("first", "second"):
        with worker_files(run, attempt=2, world_rank=1):
            say(text)
    assert [line for line in kept(run) if "process" not in line] == ["first", "second"]


def test_records_of_logging_are_kept_and_only_warnings_are_shown_as_without_a_handler(
    run: Storage, capsys: pytest.CaptureFixture[str]
) -> None:
    with as_in_a_plain_program() as logger, worker_files(run, attempt=2, world_rank=1):
        logger.setLevel(logging.INFO)
        logger.info("told")
        logger.warning("warned")
        logger.setLevel(logging.NOTSET)
    assert kept(run) == ["INFO somebody: told", "WARNING somebody: warned"]
    assert capsys.readouterr().err == "warned\n"


def test_a_record_that_another_handler_prints_is_kept_once(
    run: Storage, capsys: pytest.CaptureFixture[str]
) -> None:
    with as_in_a_plain_program() as logger, worker_files(run, attempt=2, world_rank=1):
        for owner in (logging.getLogger(), logger):
            printing = logging.StreamHandler()
            owner.addHandler(printing)
            logger.warning("once, by %s", owner.name)
            owner.removeHandler(printing)
            say("printed")
    assert kept(run) == [
        *("WARNING somebody: once, by root", "printed"),
        *("once, by somebody", "printed"),
    ]
    assert capsys.readouterr().err == "once, by root\nonce, by somebody\n"


def test_python_warnings_are_kept(run: Storage) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        with worker_files(run, attempt=2, world_rank=1):
            sys.stderr.write(warnings.formatwarning("odd", UserWarning, "file.py", 3))
    assert kept(run)[0] == "file.py:3: UserWarning: odd"


def test_a_note_is_kept_and_shown_nowhere(run: Storage, capsys: pytest.CaptureFixture[str]) -> None:
    with worker_files(run, attempt=2, world_rank=1) as files:
        files.note("attempt 2 begins")
    assert kept(run) == ["attempt 2 begins"]
    assert capsys.readouterr() == ("", "")


def test_lines_of_threads_and_forked_processes_stay_whole(tmp_path: Path) -> None:
    file = LineFile(tmp_path / "log")
    file.stream("the parent's half")

    def write() -> None:
        for number in range(200):
            file.stream(f"line {number} ")
            file.stream("of mine\n")

    threads = [threading.Thread(target=write) for _ in range(4)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads
        child = os.fork()
    if child == 0:
        write()
        file.close()
        os._exit(0)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert os.waitpid(child, 0)[1] == 0
    file.close()
    lines = (tmp_path / "log").read_text().splitlines()
    assert lines.count("the parent's half") == 1
    assert sorted(set(lines)) == sorted(
        ["the parent's half", *(f"line {number} of mine" for number in range(200))]
    )
    assert len(lines) == 1 + 5 * 200


def test_a_line_without_an_end_is_written_when_it_grows_long(tmp_path: Path) -> None:
    file = LineFile(tmp_path / "log")
    file.stream("." * MAX_LINE)
    assert (tmp_path / "log").stat().st_size == 0
    file.stream(".")
    assert (tmp_path / "log").stat().st_size == MAX_LINE + 1
    file.close()


def test_a_log_that_cannot_be_written_is_told_once_and_stops_nobody(
    run: Storage, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "logs").write_text("in the way")
    with worker_files(run, attempt=2, world_rank=1):
        sys.stdout.write("goes on")
    assert capfd.readouterr().err.count("this worker's log is incomplete: ") == 1
    assert (tmp_path / "run" / "logs").read_text() == "in the way"


def test_the_output_folder_is_the_workers_own_and_the_same_for_all_attempts(run: Storage) -> None:
    with worker_files(run, attempt=2, world_rank=1) as files:
        assert files.output_folder == Path(run.root, "outputs", "worker-1")
        assert not files.output_folder.exists()


def test_an_object_store_gets_log_and_files_when_the_attempt_ends() -> None:
    memory, _ = fs.FileSystem.from_uri("mock://")
    run = Storage(root="bucket/run", filesystem=memory, scheme="s3")
    with worker_files(run, attempt=2, world_rank=1) as files:
        say("far away")
        (files.output_folder / "deep").mkdir(parents=True)
        (files.output_folder / "deep" / "o.txt").write_text("mine")
        assert not run.exists(NAME)
    assert kept(run) == ["far away"]
    assert run.read("outputs/worker-1/deep/o.txt") == b"mine"
    assert not files.output_folder.exists()


def test_an_object_store_gets_the_log_of_an_attempt_that_raises() -> None:
    memory, _ = fs.FileSystem.from_uri("mock://")
    run = Storage(root="bucket/run", filesystem=memory, scheme="s3")

    def train() -> None:
        with worker_files(run, attempt=2, world_rank=1):
            say("before")
            raise ValueError("own")

    with pytest.raises(ValueError, match="own"):
        train()
    assert kept(run) == ["before"]
