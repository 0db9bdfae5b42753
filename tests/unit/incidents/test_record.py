from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from samestep.checkpoint.storage import Storage
from samestep.errors import StorageError
from samestep.incidents.record import Incident, list_incidents, read, write
from samestep.names import IncidentKind


@pytest.fixture
def run(tmp_path: Path) -> Storage:
    return Storage.at(str(tmp_path / "run"))


def incident(**changes: Any) -> Incident:
    fields: dict[str, Any] = {
        "kind": IncidentKind.EXCEPTION,
        "step": 12,
        "attempt": 2,
        "message": "boom",
        "world_rank": 1,
        "host": "node-1",
        "time": 5.0,
        "seen": {"loss": "nan"},
        "traceback": "Traceback ...",
        "evidence": ["checkpoints/damaged/step-00000012-1"],
    }
    return Incident(**{**fields, **changes})


def test_an_incident_is_read_back_as_it_was_written(run: Storage) -> None:
    written = write(run, incident())
    assert written.id == "exception-step-00000012-attempt-2"
    assert read(run, written.id) == written
    assert run.exists(f"incidents/{written.id}/incident.json")


def test_two_incidents_of_the_same_step_are_both_kept(run: Storage) -> None:
    first, second = write(run, incident()), write(run, incident(message="again"))
    assert second.id == f"{first.id}-2"
    assert [item.message for item in list_incidents(run)] == ["boom", "again"]


def test_incidents_are_listed_in_order_of_time(run: Storage) -> None:
    write(run, incident(time=9.0, message="late"))
    write(run, incident(time=1.0, message="early", kind=IncidentKind.CRASH))
    assert [item.message for item in list_incidents(run)] == ["early", "late"]


def test_a_run_without_incidents_has_an_empty_list(run: Storage) -> None:
    assert list_incidents(run) == []


def test_an_unfinished_folder_is_no_incident(run: Storage) -> None:
    run.write("incidents/x/notes.txt", b"")
    assert list_incidents(run) == []


def test_what_may_be_left_out_may_be_left_out() -> None:
    given = Incident.from_json({"kind": "crash", "step": 1, "attempt": 1, "message": "gone"})
    assert given == Incident(kind=IncidentKind.CRASH, step=1, attempt=1, message="gone")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 2}, "format 2; this samestep reads format 1"),
        ({"kind": "sneeze"}, "sneeze"),
        ({"mood": "bad"}, "mood"),
    ],
)
def test_what_does_not_fit_the_format_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(StorageError, match=message):
        Incident.from_json(incident().to_json() | changes)


def test_an_unknown_incident_is_answered_with_those_there_are(run: Storage) -> None:
    known = write(run, incident()).id
    with pytest.raises(StorageError, match=f"no incident 'x'; it has: {known}"):
        read(run, "x")


@pytest.mark.parametrize("content", [b"{", b"[]"])
def test_a_damaged_incident_is_refused(run: Storage, content: bytes) -> None:
    run.write("incidents/x/incident.json", content)
    with pytest.raises(StorageError, match=r"incident\.json"):
        read(run, "x")
