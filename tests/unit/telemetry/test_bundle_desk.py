from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from recording import begin, kinds

from samestep.checkpoint.manifest import FileEntry
from samestep.checkpoint.storage import Storage
from samestep.errors import BundleError, RecorderError
from samestep.incidents.bundle import REQUIRED, Bundle, StateSource, folder_of, has_bundle
from samestep.incidents.record import list_incidents, read
from samestep.names import IncidentKind
from samestep.telemetry.bundle_desk import CLAIM_S, BundleDesk
from samestep.telemetry.recorder import Recorder

Open = Callable[..., Recorder]
NAN = {"kind": "non_finite", "step": 4, "message": "m", "seen": {"loss": "nan"}}


def text_of(incident_id: str) -> str:
    files = {name: FileEntry.of(b"") for name in REQUIRED}
    bundle = Bundle(
        incident=incident_id,
        kind=IncidentKind.NON_FINITE,
        step=4,
        state_step=4,
        state_source=StateSource.LIVE,
        sample_steps=(),
        missing=(),
        left_out=(),
        numerics={},
        environment={},
        provenance={},
        num_bytes=0,
        max_bytes=1,
        created_s=0.0,
        files=files,
    )
    return bundle.to_json()


@pytest.fixture
def now() -> list[float]:
    return [0.0]


@pytest.fixture
def desk(run: Storage, recorder: Recorder, now: list[float]) -> BundleDesk:
    attempt = begin(recorder)
    for step in (4, 5, 6):
        recorder.record_incident(attempt, {**NAN, "step": step})
    return BundleDesk(run=run, keep=2, monotonic=lambda: now[0])


def id_of(step: int) -> str:
    return f"non_finite-step-{step:08d}-attempt-1"


def test_a_bundle_counts_when_it_is_committed_and_not_before(
    desk: BundleDesk, run: Storage
) -> None:
    token = desk.claim(id_of(4))["token"]
    assert desk.claim(id_of(4)) == {"token": None, "why": "under way"}
    assert not has_bundle(folder_of(run, id_of(4)))
    assert desk.commit(id_of(4), token, text_of(id_of(4)))
    assert desk.commit(id_of(4), token, text_of(id_of(4)))  # the answer may have been lost
    assert has_bundle(folder_of(run, id_of(4)))
    assert desk.claim(id_of(4)) == {"token": None, "why": "has one"}
    assert [item["id"] for item in desk.lacking()] == [id_of(5), id_of(6)]


def test_a_run_has_no_more_than_it_may(desk: BundleDesk) -> None:
    tokens = [desk.claim(id_of(step))["token"] for step in (4, 5)]
    assert desk.claim(id_of(6)) == {"token": None, "why": "full"}
    assert desk.lacking() == []
    desk.drop(id_of(4), "another's")
    assert desk.claim(id_of(6))["why"] == "full"
    desk.drop(id_of(4), tokens[0])
    assert desk.claim(id_of(6))["token"]


def test_who_died_while_writing_is_not_waited_for_for_ever_and_comes_too_late_then(
    desk: BundleDesk, now: list[float]
) -> None:
    late = desk.claim(id_of(4))["token"]
    assert id_of(4) not in [item["id"] for item in desk.lacking()]
    now[0] = CLAIM_S
    assert id_of(4) in [item["id"] for item in desk.lacking()]
    token = desk.claim(id_of(4))["token"]
    assert not desk.commit(id_of(4), late, text_of(id_of(4)))
    assert desk.commit(id_of(4), token, text_of(id_of(4)))


def test_what_is_no_bundle_of_the_incident_is_not_committed(desk: BundleDesk) -> None:
    token = desk.claim(id_of(4))["token"]
    with pytest.raises(BundleError):
        desk.commit(id_of(4), token, "{}")
    with pytest.raises(RecorderError, match="another's"):
        desk.commit(id_of(4), token, text_of(id_of(5)))


def test_a_recorder_made_anew_knows_the_bundles_there_are(
    desk: BundleDesk, open_recorder: Open
) -> None:
    desk.commit(id_of(4), "", text_of(id_of(4)))
    recorder = open_recorder(incidents={"bundle": {"keep": 2}})
    assert recorder.claim_bundle(id_of(4))["why"] == "has one"
    attempt = begin(recorder)
    crash = {"kind": "crash", "step": 9, "message": "killed", "attempt": attempt}
    noted = recorder.note_incident(crash)
    recorder.note_incident({**crash, "kind": "storage"})  # nothing to replay there
    assert [item["id"] for item in recorder.lacking_bundles()] == [id_of(5), id_of(6), noted]


def test_an_incident_seen_again_after_a_restart_is_recorded_once(
    run: Storage, open_recorder: Open
) -> None:
    first = open_recorder()
    incident_id = first.record_incident(begin(first), NAN)
    second = open_recorder()
    attempt = begin(second)
    assert second.record_incident(attempt, NAN) == incident_id
    other: dict[str, Any] = {**NAN, "seen": {"loss": "inf"}}
    assert second.record_incident(attempt, other) != incident_id
    assert len(list_incidents(run)) == 2
    assert kinds(run).count("incident") == 2


def test_what_the_job_calls_secret_is_not_recorded(run: Storage, open_recorder: Open) -> None:
    recorder = open_recorder(
        args={"token": "hush-hush"}, incidents={"bundle": {"secret_args": ["token"]}}
    )
    told = {
        "kind": "exception",
        "step": 1,
        "message": "no access with hush-hush",
        "traceback": "at https://me:pass-word@host/x",
        "seen": {"args": ["hush-hush"]},
    }
    incident = read(run, recorder.record_incident(begin(recorder), told))
    assert incident.message == "no access with (left out: secret)"
    assert incident.traceback == "at https://host/x"
    assert incident.seen == {"args": ["(left out: secret)"]}
    ledger = b"".join(run.read(name) for name in run.walk("ledger"))
    assert b"hush-hush" not in ledger
