"""What the TARGET of a replay means, told before torch is loaded."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from samestep.checkpoint.storage import Storage
from samestep.cli.replay_target import find_target
from samestep.errors import BundleError, InputError
from samestep.incidents.record import Incident, write
from samestep.names import IncidentKind

MakeRun = Callable[..., Storage]


def find(text: str, **options: object) -> object:
    given = {"incident_id": None, "at": None, "from_step": None} | options
    return find_target(text, **given)  # type: ignore[arg-type]


def test_an_incident_of_a_run_has_its_step_and_kind(make_run: MakeRun) -> None:
    run = make_run("one")
    incident = Incident(kind=IncidentKind.CRASH, step=4, attempt=1, message="gone")
    name = write(run, incident).id
    found = find_target(str(run.root), incident_id=name, at=None, from_step=None)
    assert (found.step, found.kind, found.bundle) == (4, IncidentKind.CRASH, None)
    assert found.told == f"{run.root} {name}"
    with pytest.raises(InputError, match=f"not both; incidents of .*: {name}"):
        find(str(run.root), incident_id=name, at=3)


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04 cut short"])
def test_a_file_that_is_no_packed_bundle_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file.zip"
    path.write_bytes(content)
    with pytest.raises(BundleError, match=r"file\.zip is no packed bundle"):
        find(str(path))


@pytest.mark.parametrize(
    ("spec", "incident"),
    [
        (b"workload: a:A\nbatch_size: &x 1\nmax_steps: *x\n", b'{"kind": "crash"}'),
        (b"\xff", b'{"kind": "crash"}'),
        (b"workload: a:A\nbatch_size: 1\nmax_steps: 1\n", b'{"kind": "storm"}'),
        (b"workload: a:A\nbatch_size: 1\nmax_steps: 1\n", b"[" * 100_000),
    ],
)
def test_an_archive_that_holds_something_odd_is_refused(
    tmp_path: Path, spec: bytes, incident: bytes
) -> None:
    path = tmp_path / "file.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("spec.yaml", spec)
        archive.writestr("incident.json", incident)
    with pytest.raises(BundleError):
        find(str(path))


def test_finding_a_target_loads_no_torch() -> None:
    code = "import sys, samestep.cli.replay, samestep.cli.bisect; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "False\n"
