"""The small files that tell what a run is (its job, its first numerics) and how it ended."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import yaml

from samestep import yaml12
from samestep.checkpoint.storage import Storage
from samestep.errors import RunConflictError, SpecError, StorageError
from samestep.exact.digest import pack_float
from samestep.exact.numerics import BINDING, differences
from samestep.names import NUMERICS_FILE, RESULT_FILE, SPEC_FILE, Event
from samestep.spec import JobSpec, differing_fields, parse_spec
from samestep.telemetry.records import unpack

FORMAT: Final = 1


def parse_spec_text(text: str, *, source: str) -> JobSpec:
    """The job that `spec.dump_spec` wrote.

    Raises:
        SpecError: it is none, or was written by another version of samestep.
    """
    try:
        data = yaml12.load(text)
    except yaml.YAMLError as error:
        raise SpecError(f"{source} is not valid YAML: {error}") from error
    return parse_spec(data, source=source)


def read_spec(run: Storage) -> JobSpec:
    """The job of a run.

    Raises:
        StorageError: this is no run directory.
    """
    if not run.exists(SPEC_FILE):
        raise StorageError(
            f"{run.uri} is no run directory (it has no {SPEC_FILE}); give the path of one, or the "
            "name of a run under ./runs"
        )
    return parse_spec_text(run.read(SPEC_FILE).decode(), source=f"{run.uri}/{SPEC_FILE}")


def keep_spec(run: Storage, spec_yaml: str) -> None:
    """Writes the job into the run directory, over an earlier one with the same bits.

    Raises:
        RunConflictError: the run belongs to a job whose bits would be others; names the fields.
    """
    if run.exists(SPEC_FILE):
        before = run.read(SPEC_FILE).decode()
        if before == spec_yaml:
            return
        found = differing_fields(read_spec(run), parse_spec_text(spec_yaml, source="the new job"))
        if found:
            raise RunConflictError(
                f"the run {run.uri} belongs to another job; in the run against now:\n  "
                + "\n  ".join(found)
                + "\ngive this one another name (--name), or use the job the run was started with"
            )
    run.write(SPEC_FILE, spec_yaml.encode())


def numerics_events(
    run: Storage, numerics: Mapping[str, Any], previous: str | None, mixed: Sequence[str]
) -> list[tuple[Event, dict[str, Any]]]:
    """What an attempt's start has to say of its numerics, for the ledger.

    Args:
        run: the run directory; its first fingerprint is kept there.
        numerics: of the attempt; empty where it told none.
        previous: `numerics_id` of the attempt before; None without one.
        mixed: lines telling why the bits depend on placement.
    """
    told: list[tuple[Event, dict[str, Any]]] = []
    if mixed:
        told.append((Event.PLACEMENT_DEPENDENT, {"differences": list(mixed)}))
    if not numerics:
        return told
    found = differences(keep_numerics(run, numerics), numerics)
    if previous is not None and previous != numerics_id(numerics):
        fields = {"differences": found or ["as at the run's start again"]}
        told.append((Event.NUMERICS_CHANGED, fields | {"numerics": dict(numerics)}))
    return told


def keep_numerics(run: Storage, fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """Writes the fingerprint where there is none yet; returns the run's first."""
    first = read_numerics(run)
    if first is None:
        first = dict(fingerprint)
        run.write(NUMERICS_FILE, _text({"format": FORMAT, "fingerprint": first}))
    return first


def read_numerics(run: Storage) -> dict[str, Any] | None:
    """The fingerprint that the run's first attempt had; None before that.

    Raises:
        StorageError: the file is damaged or of another format.
    """
    body = _read(run, NUMERICS_FILE)
    return dict(body["fingerprint"]) if body is not None else None


def numerics_id(fingerprint: Mapping[str, Any]) -> str:
    """Equal for fingerprints whose binding parts are; empty for no fingerprint."""
    if not fingerprint:
        return ""
    text = json.dumps(fingerprint.get(BINDING, {}), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def write_result(run: Storage, result: Mapping[str, Any]) -> None:
    """Writes how the run ended; floats as plain numbers, for scripts, where JSON has them."""
    run.write(RESULT_FILE, _text({"format": FORMAT, **_packed_where_needed(result)}))


def read_result(run: Storage) -> dict[str, Any] | None:
    """How the run ended; None while it goes on or when it died.

    Raises:
        StorageError: the file is damaged or of another format.
    """
    body = _read(run, RESULT_FILE)
    return dict(unpack(body)) if body is not None else None


def _read(run: Storage, name: str) -> dict[str, Any] | None:
    if not run.exists(name):
        return None
    path = f"{run.uri}/{name}"
    try:
        body = json.loads(run.read(name))
        version = body.pop("format")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StorageError(f"{path} is damaged ({error!r}); restore it from a copy") from error
    if version != FORMAT:
        raise StorageError(
            f"{path} has format {version!r}; this samestep reads format {FORMAT}: use the version "
            "that wrote it"
        )
    assert isinstance(body, dict)
    return body


def _packed_where_needed(value: Any) -> Any:
    """Finite floats keep their bits as JSON numbers; the others are packed as in the ledger."""
    if isinstance(value, float):
        return value if math.isfinite(value) else pack_float(value)
    if isinstance(value, Mapping):
        return {str(key): _packed_where_needed(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_packed_where_needed(item) for item in value]
    return value


def _text(data: Mapping[str, Any]) -> bytes:
    return json.dumps(data, indent=2, allow_nan=False).encode() + b"\n"
