"""`bundle.json`: what a bundle consists of, and the proof that it is whole; written last.

A bundle is the folder of an incident with all that is needed to take its step again elsewhere,
without the run and without its data:

    incident.json     what happened
    bundle.json       this
    spec.yaml         the job, without its secrets
    state/            the state, as a checkpoint's folder
    samples/          the batches of the steps from the state's on, as far as there was room
    ledger.jsonl      lines of the run's ledger around the step
    step.json         what the step came to, where the ledger does not have it
    code/             the workload's files, if the job asks for them

Sizes and SHA-256 of all files stand in it, and a hash of itself. They prove that it is whole, not
where it comes from. Nothing of a bundle is ever unpickled or imported by who reads it.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Final

from samestep import __version__, names
from samestep.checkpoint.manifest import FileEntry
from samestep.checkpoint.storage import Storage
from samestep.errors import BundleError
from samestep.incidents import strict_json as strict
from samestep.names import IncidentKind

FORMAT: Final = 1
MAX_FILES: Final = 20_000
MAX_MANIFEST_BYTES: Final = 32 << 20
REQUIRED: Final = (
    names.INCIDENT_FILE,
    names.SPEC_FILE,
    names.BUNDLE_LEDGER_FILE,
    f"{names.BUNDLE_STATE_DIR}/{names.MANIFEST_FILE}",
    f"{names.BUNDLE_STATE_DIR}/{names.VALUES_FILE}",
)

_PART: Final = r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,199}"
_PATH: Final = re.compile(
    rf"{re.escape(names.INCIDENT_FILE)}|{re.escape(names.SPEC_FILE)}"
    rf"|{re.escape(names.BUNDLE_LEDGER_FILE)}|{re.escape(names.BUNDLE_STEP_FILE)}"
    rf"|(?:{names.BUNDLE_STATE_DIR}|{names.BUNDLE_SAMPLES_DIR})/{_PART}"
    rf"|{names.BUNDLE_CODE_DIR}(?:/{_PART}){{1,20}}"
)
_ID: Final = re.compile(r"[a-z0-9_]+-step-\d{8,18}-attempt-\d+(?:-\d+)?")
_SAMPLE: Final = re.compile(re.escape(names.CHECKPOINT_PREFIX) + r"(\d{8,18})\.(json|safetensors)")
_SHA256: Final = re.compile(r"[0-9a-f]{64}")


class StateSource(StrEnum):
    """Where a bundle's state comes from: a closed list."""

    LIVE = "live"
    SURVIVOR = "survivor"
    SNAPSHOT = "snapshot"
    CHECKPOINT = "checkpoint"
    START = "start"


@dataclass(frozen=True, kw_only=True)
class Bundle:
    """What stands in `bundle.json`.

    Attributes:
        incident: id of the incident.
        kind: of the incident.
        step: the step that was being taken.
        state_step: steps taken before the state; one more than `step` where it was taken after the
            update, since what happened came after it.
        state_source: where it comes from; `live` is the very state at which it happened.
        sample_steps: steps of which every shard's batch is here.
        missing: what is not here, and why; sentences.
        left_out: fields of the job whose values are secret, as `args.token`.
        numerics: the fingerprint of the attempt that took the step.
        environment: variables of the process that wrote it; None where the value is not told.
        provenance: where it was made: versions, git revision, host, folders. For people.
        num_bytes: of all files but this one.
        max_bytes: the limit that it was written under.
        created_s: Unix time.
        files: size and SHA-256 of each, by path.
        samestep_version: that wrote it.
    """

    incident: str
    kind: IncidentKind
    step: int
    state_step: int
    state_source: StateSource
    sample_steps: tuple[int, ...]
    missing: tuple[str, ...]
    left_out: tuple[str, ...]
    numerics: Mapping[str, Any]
    environment: Mapping[str, str | None]
    provenance: Mapping[str, Any]
    num_bytes: int
    max_bytes: int
    created_s: float
    files: Mapping[str, FileEntry] = field(default_factory=dict)
    samestep_version: str = __version__

    @property
    def first_step(self) -> int:
        """The first step whose samples may be here."""
        return min(self.state_step, self.step)

    def to_json(self) -> str:
        """Strict JSON text, with a hash of itself."""
        body = {
            "format": FORMAT,
            **asdict(self),
            "kind": str(self.kind),
            "state_source": str(self.state_source),
            "sample_steps": list(self.sample_steps),
            "missing": list(self.missing),
            "left_out": list(self.left_out),
            "files": {name: asdict(self.files[name]) for name in sorted(self.files)},
        }
        return json.dumps({**body, "sha256": _hash(body)}, indent=1, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, data: bytes) -> Bundle:
        """Reads what `to_json` wrote.

        Raises:
            BundleError: it is none, of another format version, altered, or with odd content.
        """
        what = names.BUNDLE_FILE
        body = strict.read_json(data, what, max_bytes=MAX_MANIFEST_BYTES)
        if type(body) is not dict:
            raise BundleError(f"{what} should be an object, but is a {type(body).__name__}")
        if body.get("format") != FORMAT:
            raise BundleError(
                f"{what} has format {body.get('format')!r}; this version of samestep reads format "
                f"{FORMAT}: use the version that wrote it"
            )
        if body.pop("sha256", None) != _hash(body):
            raise BundleError(f"{what} was altered: its own hash does not fit its content")
        strict.fields(body, what, _KINDS)
        with strict.refusing(what):
            return cls._of_body(body)

    @classmethod
    def _of_body(cls, body: dict[str, Any]) -> Bundle:
        what = names.BUNDLE_FILE
        given = {key: value for key, value in body.items() if key != "format"}
        given["kind"] = IncidentKind(given["kind"])
        given["state_source"] = StateSource(given["state_source"])
        for key in ("missing", "left_out"):
            given[key] = tuple(strict.items(given[key], f"{what}: {key}", str, limit=10_000))
        steps = strict.items(given["sample_steps"], f"{what}: sample_steps", int, limit=MAX_FILES)
        given["sample_steps"] = tuple(steps)
        for key in ("step", "state_step", "num_bytes", "max_bytes"):
            strict.count(given[key], f"{what}: {key}")
        for name, value in given["environment"].items():
            if value is not None and type(value) is not str:
                raise BundleError(f"{what}: environment: {name} is no text")
        given["files"] = _files_of(given["files"])
        found = cls(**given)
        found._check()
        return found

    def _check(self) -> None:
        what = names.BUNDLE_FILE
        if _ID.fullmatch(self.incident) is None:
            raise BundleError(f"{what}: {self.incident!r} is no id of an incident")
        lacking = [name for name in REQUIRED if name not in self.files]
        if lacking:
            raise BundleError(f"{what} lists no {', '.join(lacking)}")
        if self.state_step > self.step + 1:
            raise BundleError(f"{what}: the state of step {self.state_step} is behind {self.step}")
        if self.num_bytes != sum(entry.num_bytes for entry in self.files.values()):
            raise BundleError(f"{what}: num_bytes is not the sum of the files'")
        steps = list(self.sample_steps)
        if steps != sorted(set(steps)) or any(
            not self.first_step <= step <= self.step for step in steps
        ):
            raise BundleError(f"{what}: sample_steps are not steps between state and incident")


def is_path(name: str) -> bool:
    """Whether a bundle may have a file of that name; none leads out of its folder."""
    return _PATH.fullmatch(name) is not None


def sample_file(step: int, suffix: str) -> str:
    """Name of the file of a step's samples, without the folder."""
    return f"{names.CHECKPOINT_PREFIX}{step:08d}.{suffix}"


def step_of_sample(name: str) -> int | None:
    """The step whose file has this name; None: it is none."""
    match = _SAMPLE.fullmatch(name)
    if match is None or sample_file(int(match[1]), match[2]) != name:
        return None
    return int(match[1])


def folder_of(run: Storage, incident_id: str) -> Storage:
    """Where the bundle of an incident lies, if there is one."""
    return run.child(names.INCIDENTS_DIR).child(incident_id)


def has_bundle(folder: Storage) -> bool:
    """Whether one was finished there."""
    return folder.exists(names.BUNDLE_FILE)


_KINDS: Final[Mapping[str, strict.Kinds]] = {
    "format": int,
    "incident": str,
    "kind": str,
    "step": int,
    "state_step": int,
    "state_source": str,
    "sample_steps": list,
    "missing": list,
    "left_out": list,
    "numerics": dict,
    "environment": dict,
    "provenance": dict,
    "num_bytes": int,
    "max_bytes": int,
    "created_s": strict.NUMBER,
    "files": dict,
    "samestep_version": str,
}


def _files_of(data: dict[str, Any]) -> dict[str, FileEntry]:
    what = names.BUNDLE_FILE
    if len(data) > MAX_FILES:
        raise BundleError(f"{what} lists {len(data)} files; at most {MAX_FILES} are read")
    found = {}
    for name, entry in data.items():
        if not is_path(name):
            raise BundleError(f"{what} lists {name[:200]!r}, which is no file of a bundle")
        kept = strict.fields(entry, f"{what}: {name}", {"num_bytes": int, "sha256": str})
        strict.count(kept["num_bytes"], f"{what}: {name}")
        if _SHA256.fullmatch(kept["sha256"]) is None:
            raise BundleError(f"{what}: {name} has no SHA-256")
        found[name] = FileEntry(**kept)
    if len({name.casefold() for name in found}) < len(found):
        raise BundleError(f"{what} lists files whose names differ in upper and lower case alone")
    return found


def _hash(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()
