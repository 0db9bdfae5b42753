"""What two processes can compare of an exception."""

from __future__ import annotations

import pytest

from samestep.engine.failure import Failure
from samestep.engine.shard import in_user_code
from samestep.errors import UserCodeError, WorkloadError
from samestep.replay.raised import Raised


def fails(kind: type[Exception]) -> None:
    raise kind("told\nwith a second line: ValueError: of its own")


def caught(kind: type[Exception]) -> UserCodeError:
    with pytest.raises(UserCodeError) as found:
        in_user_code(lambda: fails(kind), "loss of step 3, shard 1")
    return found.value


def in_incident(error: Exception, world_size: int = 1) -> Raised:
    failure = Failure.of(error, step=3, attempt=1, world_rank=0, world_size=world_size)
    found = Raised.in_incident(failure.to_incident())
    assert found is not None
    return found


def test_the_workloads_own_exception_and_line_are_taken_from_its_traceback() -> None:
    error = caught(RuntimeError)
    for found in (Raised.of(error), in_incident(error), in_incident(error, world_size=3)):
        assert (found.kind, found.function) == ("RuntimeError", "fails")
        assert found.file == __file__
        assert found.line == fails.__code__.co_firstlineno + 1


def test_an_exception_of_samestep_is_taken_from_its_own_traceback() -> None:
    with pytest.raises(WorkloadError) as caught_error:
        raise WorkloadError("batch: of another kind\nthan the first")
    for found in (Raised.of(caught_error.value), in_incident(caught_error.value)):
        assert (found.kind, found.function) == (
            "WorkloadError",
            "test_an_exception_of_samestep_is_taken_from_its_own_traceback",
        )


def test_the_folder_of_a_file_does_not_count_but_class_and_line_do() -> None:
    found = Raised.of(caught(RuntimeError))
    moved = Raised(**{**vars(found), "file": "/elsewhere/" + found.file.rpartition("/")[2]})
    assert found.same_as(moved)
    assert not found.same_as(Raised(**{**vars(found), "line": found.line + 1}))
    assert not found.same_as(Raised.of(caught(ValueError)))
