"""Writes a bundle, in a thread behind the training, from copies that training does not touch."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from samestep import names
from samestep.checkpoint.image import Image
from samestep.checkpoint.job import perform
from samestep.checkpoint.manifest import CheckpointMeta, FileEntry
from samestep.checkpoint.state import State
from samestep.checkpoint.storage import Storage
from samestep.checkpoint.writing import Outline
from samestep.engine.rereading import Rereading
from samestep.errors import BundleError, SamestepError
from samestep.incidents.bundle import Bundle, StateSource, folder_of, has_bundle
from samestep.incidents.record import Incident
from samestep.incidents.redaction import Redaction
from samestep.incidents.source_files import source_files
from samestep.names import THREAD_BUNDLE
from samestep.spec import JobSpec, bits_part, dump_spec
from samestep.telemetry import provenance
from samestep.telemetry.ledger import encode_line, lines_around
from samestep.telemetry.link import Target
from samestep.telemetry.records import STEP, StepRecord

WINDOW_STEPS: Final = 300
"""Steps before the incident's of which the ledger's lines are kept."""
MAX_LEDGER_BYTES: Final = 4 << 20
MAX_LEDGER_SHARE: Final = 8
MANIFEST_BYTES: Final = 64 << 10
ENTRY_BYTES: Final = 400

logger = logging.getLogger(__name__)


class Copied:
    """A state in private memory of this process.

    Args:
        state: the live one; it may change again when this is made.

    Raises:
        CheckpointError: something in it can't be kept.
    """

    def __init__(self, state: State) -> None:
        self.outline = Outline.of(state)
        self.image = Image.private(self.outline.plan.num_bytes)
        self.image.fill(self.outline.plan, self.outline.tensors, self.outline.parts[0])


def state_bytes(state: State) -> int:
    """About what a state takes in a bundle."""
    return sum(t.nbytes + ENTRY_BYTES for t in state.tensors.values()) + MANIFEST_BYTES


def ledger_bytes(max_bytes: int) -> int:
    """What the ledger's lines may take of a bundle."""
    return min(MAX_LEDGER_BYTES, max_bytes // MAX_LEDGER_SHARE)


@dataclass(frozen=True, kw_only=True)
class Material:
    """What a bundle is made of.

    Attributes:
        incident: what happened, with its id.
        token: leave to write it, from the recorder.
        spec: the job.
        copied: the state.
        source: where the state comes from.
        samples: being read; None: none are wanted.
        record: what the step came to; None where it came to nothing, or the ledger has it.
        records: lines that may not be in the ledger yet.
        numerics: fingerprint of the attempt.
        module: file of the workload's module; None where it has none.
        missing: what is known to be missing already.
    """

    incident: Incident
    token: str
    spec: JobSpec
    copied: Copied
    source: StateSource
    samples: Rereading | None
    record: StepRecord | None
    records: Sequence[Mapping[str, Any]]
    numerics: Mapping[str, Any]
    module: Path | None
    missing: Sequence[str] = ()


class Bundling:
    """One bundle under way.

    Args:
        material: what it is made of.
        run: the run directory.
        target: the recorder.
    """

    def __init__(self, material: Material, *, run: Storage, target: Target) -> None:
        self._run = run
        self._target = target
        # Given to the thread alone: the copy of the state goes when it ends.
        self._thread = threading.Thread(
            target=self._write, args=(material,), name=THREAD_BUNDLE, daemon=True
        )
        self._thread.start()

    def wait(self, timeout_s: float) -> bool:
        """Waits for the end; False when it has not come in time."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _write(self, made: Material) -> None:
        started_s = time.monotonic()
        writing = _Writing(made, folder_of(self._run, made.incident.id), self._run)
        try:
            bundle = writing.write()
            call = ("commit_bundle", made.incident.id, made.token, bundle.to_json())
            if self._target.call(*call):
                took_s = time.monotonic() - started_s
                self._say(
                    f"bundle of {made.incident.id}: {len(bundle.files)} files, "
                    f"{bundle.num_bytes / 1e6:,.1f} MB, written in {took_s:.1f} s"
                    + "".join(f"; {text}" for text in bundle.missing)
                )
        except Exception as error:  # whatever is wrong with a bundle, the run goes on
            writing.remove()
            give_up(self._target, made.incident.id, made.token, error)
        finally:
            if made.samples is not None:
                made.samples.close()

    def _say(self, text: str) -> None:
        self._target.call("say", text)


def give_up(target: Target, incident_id: str, token: str, error: BaseException) -> None:
    """Tells that there is no bundle, once; never raises."""
    why = f"no bundle of {incident_id}: {type(error).__name__}: {error}"
    logger.warning(why)
    try:
        target.call("drop_bundle", incident_id, token)
        target.call("say", f"{why}. Training is not affected")
    except Exception as late:  # the recorder is away, or the run is over: nobody else to tell
        logger.warning("no bundle of %s, and the recorder is not told: %r", incident_id, late)


class _Writing:
    """The files of one bundle, one after another."""

    def __init__(self, material: Material, folder: Storage, run: Storage) -> None:
        self._made = material
        self._folder = folder
        self._run = run
        self._redaction = Redaction(material.spec)
        self._spec, self._left_out = self._redaction.spec()
        self._files: dict[str, FileEntry] = {}
        self._missing = [self._redaction.text(text) for text in material.missing]
        self._max_bytes = material.spec.incidents.bundle.max_bytes

    def write(self) -> Bundle:
        """Writes all files but `bundle.json`; returns what stands in that.

        Raises:
            SamestepError: that can't be done, or the state alone is too large.
        """
        made = self._made
        self.remove()
        self._state()
        incident = self._folder.read(names.INCIDENT_FILE)
        self._files[names.INCIDENT_FILE] = FileEntry.of(incident)
        self._put(names.SPEC_FILE, dump_spec(self._spec).encode())
        if made.record is not None:
            self._put(names.BUNDLE_STEP_FILE, encode_line(made.record.to_json()))
        self._put(names.BUNDLE_LEDGER_FILE, self._ledger())
        if self._room_bytes < 0:
            raise BundleError(
                f"state and records take {self._num_bytes} bytes, and incidents.bundle.max_bytes "
                f"is {self._max_bytes}"
            )
        steps = self._samples()
        self._code()
        return Bundle(
            incident=made.incident.id,
            kind=made.incident.kind,
            step=made.incident.step,
            state_step=made.copied.outline.step,
            state_source=made.source,
            sample_steps=tuple(steps),
            missing=tuple(self._missing),
            left_out=tuple(self._left_out),
            numerics=dict(made.numerics),
            environment=self._environment(),
            provenance=self._redaction.plain(self._provenance()),
            num_bytes=self._num_bytes,
            max_bytes=self._max_bytes,
            created_s=time.time(),
            files=self._files,
        )

    def remove(self) -> None:
        """Removes what this, or a writer that was killed, has written; never raises.

        A bundle that is finished (its answer may have been lost) stays.
        """
        names_of_parts = (
            *(names.BUNDLE_STATE_DIR, names.BUNDLE_SAMPLES_DIR, names.BUNDLE_CODE_DIR),
            *(names.SPEC_FILE, names.BUNDLE_LEDGER_FILE, names.BUNDLE_STEP_FILE),
        )
        try:
            if has_bundle(self._folder):
                return
            for name in names_of_parts:
                if self._folder.exists(name):
                    self._folder.delete(name)
        except SamestepError as error:  # what stays is no bundle
            logger.warning("what was written of a bundle stays: %s", error)

    @property
    def _num_bytes(self) -> int:
        return sum(entry.num_bytes for entry in self._files.values())

    @property
    def _room_bytes(self) -> int:
        return self._max_bytes - MANIFEST_BYTES - self._num_bytes

    def _put(self, name: str, data: bytes) -> None:
        self._folder.write(name, data)
        self._files[name] = FileEntry.of(data)

    def _state(self) -> None:
        outline, image = self._made.copied.outline, self._made.copied.image
        folder = self._folder.child(names.BUNDLE_STATE_DIR)
        written = perform(outline.job(self._run, 0, image), image.memory, folder)
        meta = CheckpointMeta(
            numerics=self._made.numerics, spec=bits_part(self._spec), created_s=time.time()
        )
        manifest = outline.manifest(written, meta)
        for name, entry in manifest.files.items():
            self._files[f"{names.BUNDLE_STATE_DIR}/{name}"] = entry
        self._put(
            f"{names.BUNDLE_STATE_DIR}/{names.MANIFEST_FILE}", manifest.to_json().encode("ascii")
        )

    def _ledger(self) -> bytes:
        """Lines around the step, the newest ones if not all fit."""
        made, step = self._made, self._made.incident.step
        first = min(made.copied.outline.step, step - WINDOW_STEPS)
        lines = lines_around(self._run, made.incident.id, from_step=first)
        known = {line["step"] for line in lines if line["type"] == STEP}
        lines += [
            dict(line) for line in made.records if line["type"] != STEP or line["step"] not in known
        ]
        limit = ledger_bytes(self._max_bytes)
        kept: list[bytes] = []
        for line in reversed(lines):
            text = encode_line(self._redaction.plain(line))
            limit -= len(text)
            if limit < 0:
                self._missing.append("earlier lines of the ledger: more than is kept")
                break
            kept.append(text)
        return b"".join(reversed(kept))

    def _samples(self) -> list[int]:
        """Takes over what was read; returns the steps that are whole."""
        reading = self._made.samples
        if reading is None:
            return []
        found, why = reading.finish()
        if why:
            self._missing.append(f"samples: {self._redaction.text(why)}")
        whole = []
        for step in reading.steps:
            paths = found.get(step, [])
            size = sum(path.stat().st_size for path in paths)
            if not paths or size > self._room_bytes:
                if paths:
                    self._missing.append(f"samples of step {step}: no room is left for them")
                continue
            for path in paths:
                self._copy(path, f"{names.BUNDLE_SAMPLES_DIR}/{path.name}")
            shards = json.loads(paths[0].read_bytes())["shards"]
            lacking = [shard for shard in shards if shard["ids"] and shard["batch"] is None]
            if not lacking:
                whole.append(step)
            self._missing += [
                f"samples of step {step}, shard {shard['shard']}: {_first_line(shard['why'])}"
                for shard in lacking[:3]
            ]
        return sorted(whole)

    def _copy(self, path: Path, name: str) -> None:
        with open(path, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            size = file.tell()
            file.seek(0)
            self._folder.write_chunks(name, iter(lambda: file.read(8 << 20), b""))
        self._files[name] = FileEntry(num_bytes=size, sha256=digest)

    def _code(self) -> None:
        if not self._made.spec.incidents.bundle.code:
            return
        if self._made.module is None:
            self._missing.append("code: the workload's module has no file")
            return
        files, left_out = source_files(self._made.module, self._redaction)
        self._missing += [f"code: {text}" for text in left_out]
        if sum(map(len, files.values())) > self._room_bytes:
            self._missing.append("code: no room is left for it")
            return
        for name, data in files.items():
            self._put(name, data)

    def _environment(self) -> dict[str, str | None]:
        told = self._made.spec.incidents.bundle.environment
        return {
            name: self._redaction.text(value) if name in told else None
            for name, value in sorted(os.environ.items())
        }

    def _provenance(self) -> dict[str, Any]:
        module = self._made.module
        return {
            **provenance.source_of(module.parent if module is not None else None),
            "python": platform.python_version(),
            "system": platform.platform(),
            "host": os.uname().nodename,
            "module": str(module) if module is not None else "",
            "search": [folder for folder in sys.path if folder][:50],
            "packages": provenance.packages(),
        }


def _first_line(text: str) -> str:
    return (text.splitlines() or [""])[0]
