from __future__ import annotations

import json
import math

import pytest

from samestep.checkpoint.storage import Storage
from samestep.errors import RunConflictError, SpecError, StorageError
from samestep.spec import dump_spec, parse_spec
from samestep.telemetry import identity


def text(**changes: object) -> str:
    job = {"workload": "digits:Digits", "batch_size": 64, "max_steps": 5}
    return dump_spec(parse_spec({**job, **changes}))


def test_the_job_of_a_run_is_written_once_and_read_back(run: Storage) -> None:
    identity.keep_spec(run, text())
    identity.keep_spec(run, text())
    assert dump_spec(identity.read_spec(run)) == text()


def test_what_does_not_affect_bits_may_change(run: Storage) -> None:
    identity.keep_spec(run, text())
    identity.keep_spec(run, text(max_steps=9, workers=3))
    assert identity.read_spec(run).max_steps == 9


def test_a_job_with_other_bits_is_refused_and_the_fields_are_named(run: Storage) -> None:
    identity.keep_spec(run, text())
    with pytest.raises(RunConflictError, match=r"threads: 1 against 2") as error:
        identity.keep_spec(run, text(threads=2))
    assert "--name" in str(error.value)
    assert identity.read_spec(run).threads == 1


def test_a_folder_that_is_no_run_is_refused(run: Storage) -> None:
    with pytest.raises(StorageError, match="no run directory"):
        identity.read_spec(run)


def test_a_job_file_that_is_no_yaml_is_refused(run: Storage) -> None:
    run.write("spec.yaml", b"a: [")
    with pytest.raises(SpecError, match="not valid YAML"):
        identity.read_spec(run)


def test_the_first_numerics_stay(run: Storage) -> None:
    first = {"binding": {"torch": "2.13"}, "informational": {}}
    assert identity.read_numerics(run) is None
    assert identity.keep_numerics(run, first) == first
    assert identity.keep_numerics(run, {"binding": {"torch": "2.14"}}) == first
    assert identity.read_numerics(run) == first


def test_numerics_are_told_apart_by_their_binding_part_alone() -> None:
    a = {"binding": {"x": 1}, "informational": {"cpu": "a"}}
    b = {"binding": {"x": 1}, "informational": {"cpu": "b"}}
    c = {"binding": {"x": 2}, "informational": {"cpu": "a"}}
    assert identity.numerics_id(a) == identity.numerics_id(b)
    assert identity.numerics_id(a) != identity.numerics_id(c)
    assert identity.numerics_id({}) == ""


def test_a_result_keeps_its_floats(run: Storage) -> None:
    assert identity.read_result(run) is None
    identity.write_result(run, {"status": "done", "evaluation": {"a": 0.1, "b": math.inf}})
    assert identity.read_result(run) == {
        "status": "done",
        "evaluation": {"a": 0.1, "b": math.inf},
    }
    assert json.loads(run.read("result.json"))["evaluation"]["a"] == 0.1


@pytest.mark.parametrize("content", [b"", b"[1]", b'{"status": "done"}'])
def test_a_damaged_result_is_refused(run: Storage, content: bytes) -> None:
    run.write("result.json", content)
    with pytest.raises(StorageError, match=r"result\.json is damaged"):
        identity.read_result(run)


def test_a_result_of_another_format_is_refused(run: Storage) -> None:
    run.write("result.json", b'{"format": 2}')
    with pytest.raises(StorageError, match="format 2; this samestep reads format 1"):
        identity.read_result(run)
