"""Parts of a save at the recorder: all of them become a checkpoint, or the save fails alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from recording import begin, kinds, save

from samestep.checkpoint.committed import list_checkpoints
from samestep.checkpoint.manifest import Manifest
from samestep.checkpoint.storage import Storage
from samestep.errors import DivergenceError, RecorderError
from samestep.incidents.record import list_incidents
from samestep.names import IncidentKind
from samestep.telemetry.recorder import Recorder


@pytest.fixture
def parts_of(run: Storage) -> Callable[..., list[dict[str, Any]]]:
    """The parts of a save by two workers as each tells them, a file each."""

    def make(
        step: int, *, digests: tuple[list[str], list[str]] = ([], []), try_number: int = 1
    ) -> list[dict[str, Any]]:
        text = save(run, step)
        files = json.loads(text)["files"]
        names = sorted(files)
        first = replace(Manifest.from_json(text), files={}).to_json()
        return [
            {
                "step": step,
                "try_number": try_number,
                "world_rank": rank,
                "num_parts": 2,
                "keep": 2,
                "files": {names[rank]: files[names[rank]]},
                "manifest": first if rank == 0 else None,
                "digests": digests[rank],
            }
            for rank in range(2)
        ]

    return make


def test_the_last_part_commits_and_telling_again_changes_nothing(
    run: Storage, recorder: Recorder, push: Any, parts_of: Any
) -> None:
    attempt = begin(recorder)
    push(recorder, attempt, 1, 0, 1)
    first, second = parts_of(2)
    answer = recorder.part(attempt, second)
    assert (answer["state"], answer["message"]) == ("waiting", "for worker 0")
    assert not list_checkpoints(run)[0].whole
    for part in (first, second, first):
        answer = recorder.part(attempt, part)
        assert answer["state"] == "committed"
    assert answer["digest"] == Manifest.from_json(save_text(run, 2)).digest
    assert kinds(run).count("checkpoint_committed") == 1


def save_text(run: Storage, step: int) -> bytes:
    return run.read(f"checkpoints/step-{step:08d}/manifest.json")


def test_a_save_waits_for_its_ledger_lines(
    run: Storage, recorder: Recorder, push: Any, parts_of: Any
) -> None:
    attempt = begin(recorder)
    first, second = parts_of(2)
    recorder.part(attempt, first)
    answer = recorder.part(attempt, second)
    assert answer["state"] == "waiting"
    assert "step 0 is not in the ledger yet" in answer["message"]
    push(recorder, attempt, 1, 0, 1)
    assert recorder.part(attempt, first)["state"] == "committed"


def test_a_part_that_failed_fails_the_save_and_gives_its_room_back(
    run: Storage, recorder: Recorder, push: Any, parts_of: Any
) -> None:
    attempt = begin(recorder)
    push(recorder, attempt, 1, 0, 3)
    first, second = parts_of(2)
    recorder.part(attempt, first)
    answer = recorder.part(attempt, {**second, "files": {}, "error": "no space left"})
    assert (answer["state"], answer["message"]) == ("failed", "worker 1: no space left")
    assert recorder.part(attempt, first)["state"] == "failed"
    assert list_checkpoints(run) == []
    (incident,) = list_incidents(run)
    assert (incident.kind, incident.step) == (IncidentKind.STORAGE, 2)
    first, second = parts_of(3)
    recorder.part(attempt, {**first, "error": "still none"})
    assert len(list_incidents(run)) == 1  # the same outage
    assert kinds(run).count("checkpoint_failed") == 2
    first, second = parts_of(4)
    recorder.part(attempt, first)
    assert recorder.part(attempt, second)["state"] == "committed"
    told = [message["text"] for message in recorder.status()["messages"]]
    assert "checkpoints are written again, after 2 that failed" in told
    assert sum("could not be saved: worker 0: still none" in text for text in told) == 1


def test_a_part_of_a_worker_that_ends_is_no_incident_and_nobody_waits_for_it(
    run: Storage, recorder: Recorder, push: Any, parts_of: Any
) -> None:
    attempt = begin(recorder)
    push(recorder, attempt, 1, 0, 3)
    first, second = parts_of(2)
    recorder.part(attempt, first)
    left = {**second, "files": {}, "error": "it was given up", "has_left": True}
    told = {"state": "failed", "message": "worker 1: it was given up", "digest": ""}
    assert recorder.part(attempt, left) == told
    assert recorder.part(attempt, first) == told
    assert list_incidents(run) == []
    assert "checkpoint_failed" not in kinds(run)
    assert not run.exists("checkpoints/step-00000002")


def test_what_an_outage_kept_from_being_written_is_written_when_it_is_over(
    run: Storage, recorder: Recorder, push: Any, parts_of: Any
) -> None:
    attempt = begin(recorder)
    push(recorder, attempt, 1, 0, 3)
    first, _ = parts_of(2)
    blocker = Path(run.root, "incidents")
    blocker.write_text("in the way")
    assert recorder.part(attempt, {**first, "error": "away"})["state"] == "failed"
    blocker.unlink()
    first, second = parts_of(4)
    recorder.part(attempt, first)
    assert recorder.part(attempt, second)["state"] == "committed"
    assert [incident.step for incident in list_incidents(run)] == [2]


def test_workers_that_hold_different_states_commit_nothing(
    run: Storage, recorder: Recorder, push: Any, parts_of: Any
) -> None:
    attempt = begin(recorder)
    push(recorder, attempt, 1, 0, 1)
    first, second = parts_of(2, digests=(["a", "b"], ["a", "c"]))
    recorder.part(attempt, first)
    for part in (second, first):
        with pytest.raises(DivergenceError, match=r"the state after 2 steps differs .* worker "):
            recorder.part(attempt, part)
    assert not list_checkpoints(run)[0].whole
    assert push(recorder, attempt, 2, 2, 2)["divergence"].startswith("the state after 2 steps")
    assert [incident.kind for incident in list_incidents(run)] == [IncidentKind.DIVERGENCE]


def test_parts_of_an_attempt_that_is_over_are_refused_and_forgotten(
    run: Storage, recorder: Recorder, push: Any, parts_of: Any
) -> None:
    old = begin(recorder)
    push(recorder, old, 1, 0, 1)
    first, second = parts_of(2)
    recorder.part(old, first)
    attempt = begin(recorder)
    push(recorder, attempt, 1, 0, 1)
    with pytest.raises(RecorderError, match="attempt 1 is refused"):
        recorder.part(old, second)
    assert recorder.part(attempt, second)["message"] == "for worker 0"


def test_whom_a_save_waits_for_is_said_in_few_words_however_many(recorder: Recorder) -> None:
    attempt = begin(recorder)
    given = {"step": 2, "try_number": 1, "num_parts": 2000, "keep": 2}
    for rank in (0, 2, 1999):
        answer = recorder.part(attempt, {**given, "world_rank": rank})
    assert answer["message"] == "for worker 1, 3, 4, 5, 6, 7, 8, 9 and 1989 more"


def test_a_save_that_was_given_up_is_not_told_of_again_when_a_later_one_has_ended(
    run: Storage, recorder: Recorder, push: Any, parts_of: Any
) -> None:
    attempt = begin(recorder)
    push(recorder, attempt, 1, 0, 3)
    first, second = parts_of(2, try_number=1)
    assert recorder.part(attempt, {**second, "error": "it hangs"})["state"] == "failed"
    for part in parts_of(4, try_number=2):
        answer = recorder.part(attempt, part)
    assert answer["state"] == "committed"
    for late in (first, {**second, "error": "given up"}):
        assert recorder.part(attempt, late)["state"] == "failed"
    assert kinds(run).count("checkpoint_failed") == 1
    assert recorder.part(attempt, part)["state"] == "committed"  # its own answer is still there


def test_retention_leaves_a_save_in_flight_alone_and_clears_what_never_became_one(
    run: Storage, recorder: Recorder, push: Any, parts_of: Any
) -> None:
    attempt = begin(recorder)
    push(recorder, attempt, 1, 0, 9)
    run.write("checkpoints/step-00000001/state-0001-00001.safetensors", b"of a killed worker")
    for step in (2, 4, 6):
        first, second = parts_of(step)
        recorder.part(attempt, first)
        recorder.part(attempt, second)
    first, _ = parts_of(8)
    recorder.part(attempt, first)
    assert [(info.step, info.whole) for info in list_checkpoints(run)] == [
        (4, True), (6, True), (8, False),
    ]  # fmt: skip
