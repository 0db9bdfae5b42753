"""A bundle where it lies: in a run's directory, or a folder of its own. Nothing odd is read."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from samestep import names
from samestep.checkpoint.manifest import FileEntry, Manifest
from samestep.checkpoint.storage import Storage, is_temporary
from samestep.errors import BundleError
from samestep.incidents import strict_json as strict
from samestep.incidents.bundle import (
    MAX_FILES,
    MAX_MANIFEST_BYTES,
    Bundle,
    has_bundle,
    sample_file,
    step_of_sample,
)
from samestep.incidents.record import Incident
from samestep.incidents.spread import check_layout

PART_BYTES: Final = 16 << 20
BESIDE: Final = (names.BUNDLE_FILE, names.REPORT_FILE)
"""What may lie in the folder beside the files that `bundle.json` lists."""


def read_bundle(folder: Storage) -> Bundle:
    """What `bundle.json` says; the other files are not looked at.

    Raises:
        BundleError: there is none, or it is damaged.
        StorageError: storage can't be read.
    """
    if not has_bundle(folder):
        raise BundleError(
            f"{folder.uri} has no {names.BUNDLE_FILE}: it was never finished, or is no bundle"
        )
    _refuse_links(folder, names.BUNDLE_FILE)
    if folder.size_bytes(names.BUNDLE_FILE) > MAX_MANIFEST_BYTES:
        raise BundleError(f"{folder.uri}/{names.BUNDLE_FILE} is too long to be one")
    return Bundle.from_json(folder.read(names.BUNDLE_FILE))


def verify_bundle(folder: Storage) -> Bundle:
    """Reads `bundle.json` and compares every file with it; what they say must fit together.

    Raises:
        BundleError: a file is missing, damaged, a link, of another size, or not listed.
        StorageError: storage can't be read.
    """
    bundle = read_bundle(folder)
    found = _names_in(folder)
    missing = sorted(set(bundle.files) - found)
    extra = sorted(found - set(bundle.files) - set(BESIDE))
    if missing or extra:
        told = [f"{name} is missing" for name in missing]
        told += [f"{name} is not listed in {names.BUNDLE_FILE}" for name in extra]
        raise BundleError(f"{folder.uri}: {'; '.join(told[:5])}")
    for name, entry in bundle.files.items():
        _compare(folder, name, entry)
    incident = incident_of(folder, bundle)
    if (incident.id, incident.kind, incident.step) != (bundle.incident, bundle.kind, bundle.step):
        raise BundleError(f"{folder.uri}: {names.INCIDENT_FILE} is that of {incident.id!r}")
    _check_state(folder, bundle)
    _check_samples(folder, bundle)
    return bundle


def read_file(folder: Storage, bundle: Bundle, name: str) -> bytes:
    """A file, as `bundle.json` says it is.

    Raises:
        BundleError: it is not listed, or no longer what it was.
    """
    entry = bundle.files.get(name)
    if entry is None:
        raise BundleError(f"{folder.uri} has no {name}")
    _refuse_links(folder, name)
    if folder.size_bytes(name) != entry.num_bytes:
        raise BundleError(f"{folder.uri}/{name} has another size than {names.BUNDLE_FILE} says")
    data = folder.read(name)
    if FileEntry.of(data) != entry:
        raise BundleError(f"{folder.uri}/{name} is damaged: it has another SHA-256")
    return data


def incident_of(folder: Storage, bundle: Bundle) -> Incident:
    """What happened.

    Raises:
        BundleError: the record is malformed.
    """
    what = f"{folder.uri}/{names.INCIDENT_FILE}"
    data = strict.read_json(read_file(folder, bundle, names.INCIDENT_FILE), what)
    strict.fields(data, what, _INCIDENT)
    strict.count(data["step"], f"{what}: step")
    strict.items(data["evidence"], f"{what}: evidence", str, limit=1000)
    with strict.refusing(what):
        return Incident.from_json(data)


_NONE: Final = type(None)
_INCIDENT: Final[Mapping[str, strict.Kinds]] = {
    "format": int,
    "kind": str,
    "step": int,
    "attempt": int,
    "message": str,
    "world_rank": (int, _NONE),
    "host": str,
    "time": strict.NUMBER,
    "seen": dict,
    "traceback": (str, _NONE),
    "evidence": list,
    "id": str,
}


def _check_state(folder: Storage, bundle: Bundle) -> None:
    """The state's own manifest lists the same files, and no tensor that would fill the memory."""
    prefix = f"{names.BUNDLE_STATE_DIR}/"
    what = f"{folder.uri}/{prefix}{names.MANIFEST_FILE}"
    data = read_file(folder, bundle, f"{prefix}{names.MANIFEST_FILE}")
    with strict.refusing(what):
        manifest = Manifest.from_json(data)
        _check_manifest(manifest)
        for name, entry in manifest.tensors.items():
            check_layout(entry.layout, name=name)
    listed = {f"{prefix}{name}": entry for name, entry in manifest.files.items()}
    here = {
        name: entry
        for name, entry in bundle.files.items()
        if name.startswith(prefix) and name != f"{prefix}{names.MANIFEST_FILE}"
    }
    if listed != here or manifest.step != bundle.state_step:
        raise BundleError(f"{what} does not fit {names.BUNDLE_FILE}")


def _check_manifest(manifest: Manifest) -> None:
    strict.count(manifest.step, "step")
    for name, entry in manifest.tensors.items():
        for file in entry.files:
            if file not in manifest.files:
                raise BundleError(f"{name} lies in {file!r}, which is not listed")
        for piece in entry.pieces:
            strict.count(piece.start, name)
            strict.count(piece.stop, name)


def _check_samples(folder: Storage, bundle: Bundle) -> None:
    """Every step whose samples are said to be here has its file, and no file is of another."""
    prefix = f"{names.BUNDLE_SAMPLES_DIR}/"
    found = [name.removeprefix(prefix) for name in bundle.files if name.startswith(prefix)]
    steps = {step_of_sample(name) for name in found}
    lacking = [step for step in bundle.sample_steps if sample_file(step, "json") not in found]
    odd = [
        step
        for step in steps
        if step is None
        or not bundle.first_step <= step <= bundle.step
        or sample_file(step, "json") not in found
    ]
    if lacking or odd:
        raise BundleError(f"{folder.uri}/{prefix} does not hold the samples of the steps it should")


def _compare(folder: Storage, name: str, entry: FileEntry) -> None:
    _refuse_links(folder, name)
    if folder.size_bytes(name) != entry.num_bytes:
        raise BundleError(
            f"{folder.uri}/{name} has {folder.size_bytes(name)} bytes, and should have "
            f"{entry.num_bytes}"
        )
    digest, num_bytes = hashlib.sha256(), 0
    while data := folder.read_part(name, num_bytes, PART_BYTES):
        digest.update(data)
        num_bytes += len(data)
    if (num_bytes, digest.hexdigest()) != (entry.num_bytes, entry.sha256):
        raise BundleError(
            f"{folder.uri}/{name} is damaged: SHA-256 is {digest.hexdigest()}, should be "
            f"{entry.sha256}"
        )


def _names_in(folder: Storage) -> set[str]:
    """Paths of all files below the folder.

    Raises:
        BundleError: something there is neither file nor folder.
    """
    root = folder.local_path
    if root is None:
        prefix = f"{folder.root}/"
        return {name.removeprefix(prefix) for name in folder.walk("")}
    found: set[str] = set()
    pending: list[Any] = [root]
    while pending:
        with os.scandir(pending.pop()) as entries:
            for entry in entries:
                mode = entry.stat(follow_symlinks=False).st_mode
                if stat.S_ISDIR(mode):
                    pending.append(entry.path)
                elif not stat.S_ISREG(mode):
                    raise BundleError(
                        f"{entry.path} is a link or a device: a bundle has files and folders only"
                    )
                elif not is_temporary(entry.name):  # of a writer that was killed; never read
                    found.add(Path(entry.path).relative_to(root).as_posix())
        if len(found) + len(pending) > 2 * MAX_FILES:
            raise BundleError(f"{root} holds more than {2 * MAX_FILES} files and folders")
    return found


def _refuse_links(folder: Storage, name: str) -> None:
    """No part of the path below the folder is a link."""
    path = folder.local_path
    if path is None:
        return
    for part in name.split("/"):
        path = path / part
        if not os.path.lexists(path):
            raise BundleError(f"{path} is missing")
        mode = os.lstat(path).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
            raise BundleError(f"{path} is a link or a device: a bundle has files and folders only")
    if not stat.S_ISREG(os.lstat(path).st_mode):
        raise BundleError(f"{path} is a folder, and should be a file")
