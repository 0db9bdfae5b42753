"""What the TARGET of a replay means; finding it loads no torch, whose environment it decides."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import yaml

from samestep import names
from samestep.checkpoint.storage import Storage
from samestep.cli.find import find_run
from samestep.errors import BundleError, InputError
from samestep.incidents.record import list_incidents, read
from samestep.names import IncidentKind
from samestep.spec import JobSpec
from samestep.spec_incidents import ROLLBACK
from samestep.telemetry.identity import parse_spec_text, read_spec
from samestep.telemetry.ledger import steps
from samestep.telemetry.records import StepRecord

if TYPE_CHECKING:
    from samestep.replay.bundle_source import BundleSource
    from samestep.replay.source import Source

MAX_PEEK_BYTES: Final = 4 << 20


@dataclass(frozen=True, kw_only=True)
class Target:
    """A step that is to be taken again.

    Attributes:
        spec: of its run; of a bundle not verified yet: good for the environment and the device
            only, until `opened` tells it.
        kind: of the incident; None where it is any step.
        told: what to give `samestep replay` for it.
        run: the run directory; None where it is a bundle apart from its run.
        incident_id: of the run; None where it is any step, or a bundle apart from its run.
        step: of the run; -1 where a bundle tells.
        from_step: start from the checkpoint after so many steps.
        bundle: its folder; None: it comes from the run's checkpoints, or a packed file.
        packed: a file that holds a bundle.
    """

    spec: JobSpec
    kind: IncidentKind | None
    told: str
    run: Storage | None = None
    incident_id: str | None = None
    step: int = -1
    from_step: int | None = None
    bundle: Storage | None = None
    packed: Path | None = None

    @contextmanager
    def opened(self) -> Iterator[Source]:
        """What everything comes from, verified; loads torch."""
        from samestep.replay.bundle_source import BundleSource, unpacked
        from samestep.replay.run_source import RunSource
        from samestep.replay.source import Altered

        if self.packed is not None:
            with unpacked(self.packed) as folder:
                yield BundleSource(folder)
        elif self.bundle is not None:
            source = BundleSource(self.bundle)
            if self.run is None:
                yield source
            else:  # the run's own job has the secrets that a bundle leaves out
                yield Altered(source, spec=self.spec, more_records=self._records_behind(source))
        else:
            assert self.run is not None
            incident = read(self.run, self.incident_id) if self.incident_id is not None else None
            yield RunSource(self.run, step=self.step, incident=incident, from_step=self.from_step)

    def _records_behind(self, source: BundleSource) -> Mapping[int, StepRecord]:
        """The run's records of the steps behind a bundle's, where it went on from there."""
        went_back = source.incident.seen.get("policy") == ROLLBACK
        assert self.run is not None
        return {} if went_back else steps(self.run, self.step + 1)


def find_target(
    text: str, *, incident_id: str | None, at: int | None, from_step: int | None
) -> Target:
    """The step that is meant.

    Raises:
        InputError: there is no such bundle, run, incident or step; says what there is.
        StorageError: storage can't be read.
    """
    path, place = Path(text), Storage.at(text)
    is_packed = path.is_file()
    if is_packed or place.exists(names.BUNDLE_FILE):
        if incident_id is not None or at is not None or from_step is not None:
            raise InputError(
                f"{text} is a bundle, which holds one step and one state: give it alone, or give "
                "its run with an incident's id, --at or --from"
            )
        return _packed(path) if is_packed else _bundle(place, told=text)
    return _of_run(find_run(text), text, incident_id, at, from_step)


def _of_run(
    run: Storage, text: str, incident_id: str | None, at: int | None, from_step: int | None
) -> Target:
    if (incident_id is None) == (at is None):
        known = [incident.id for incident in list_incidents(run)]
        raise InputError(
            "give the id of an incident, or --at STEP"
            + (", not both" if at is not None else "")
            + f"; incidents of {run.uri}: {', '.join(known) or 'none'}"
        )
    if at is not None:
        told = f"{text} --at {at}"
        return Target(
            spec=read_spec(run), kind=None, told=told, run=run, step=at, from_step=from_step
        )
    assert incident_id is not None
    incident = read(run, incident_id)
    folder = run.child(names.INCIDENTS_DIR).child(incident_id)
    has_bundle = from_step is None and folder.exists(names.BUNDLE_FILE)
    return Target(
        spec=read_spec(run),
        kind=incident.kind,
        told=f"{text} {incident_id}",
        run=run,
        incident_id=incident_id,
        step=incident.step,
        from_step=from_step,
        bundle=folder if has_bundle else None,
    )


def _bundle(folder: Storage, *, told: str) -> Target:
    spec, kind = _peek(lambda name: folder.read_part(name, 0, MAX_PEEK_BYTES), folder.uri)
    return Target(spec=spec, kind=kind, told=told, bundle=folder)


def _packed(path: Path) -> Target:
    def part(name: str) -> bytes:
        with zipfile.ZipFile(path) as archive, archive.open(name) as member:
            return member.read(MAX_PEEK_BYTES)

    try:
        spec, kind = _peek(part, str(path))
    except (zipfile.BadZipFile, OSError, RuntimeError, LookupError, EOFError) as error:
        raise BundleError(f"{path} is no packed bundle: {error}") from error
    return Target(spec=spec, kind=kind, told=str(path), packed=path)


def _peek(part: Callable[[str], bytes], where: str) -> tuple[JobSpec, IncidentKind]:
    """Job and kind of incident, before anything is verified (which needs torch)."""
    what = f"{where}/{names.SPEC_FILE}"
    try:
        text = part(names.SPEC_FILE).decode("utf-8")
        events = yaml.parse(text, Loader=yaml.SafeLoader)
        if any(isinstance(event, yaml.AliasEvent) for event in events):
            raise BundleError(f"{what} has an alias; a job that was kept has none")
        incident = json.loads(part(names.INCIDENT_FILE))
        return parse_spec_text(text, source=what), IncidentKind(incident["kind"])
    except (ValueError, KeyError, TypeError, RecursionError, yaml.YAMLError) as error:
        raise BundleError(f"{where} is no bundle, or is damaged: {error}") from error
