"""A bundle as the source of a replay: nothing of the run it comes from is needed, nor its data.

Whoever made the bundle is not trusted: everything is verified first, nothing in it is imported,
and of the classes that batches are made of only those of the loaded workload's modules are rebuilt.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import yaml

from samestep import names
from samestep.checkpoint.storage import Storage
from samestep.checkpoint.verified import read_folder
from samestep.engine.survivor import HELD_KEY, Rest, Stage
from samestep.errors import BundleError, CannotReplayError
from samestep.exact.order import ShardPlan
from samestep.incidents import strict_json as strict
from samestep.incidents.bundle import Bundle, sample_file
from samestep.incidents.bundle_folder import incident_of, read_file, verify_bundle
from samestep.incidents.packing import unpack
from samestep.incidents.record import Incident
from samestep.incidents.samples import StepSamples
from samestep.replay.source import Start
from samestep.scratch import scratch_folder
from samestep.spec import JobSpec
from samestep.telemetry.identity import parse_spec_text
from samestep.telemetry.records import EVENT, KINDS, STEP, EventRecord, StepRecord, malformed

MAX_SPEC_BYTES: Final = 1 << 20


class BundleSource:
    """The step of an incident, from the state and the samples that were kept of it.

    Args:
        folder: of the bundle.
        modules: names of loaded modules whose named tuples and dataclasses may be rebuilt: those
            of the workload, once it is loaded. May be set later.

    Attributes:
        bundle: what `bundle.json` says.
        modules: as given.

    Raises:
        BundleError: it is damaged, or holds something odd.
        StorageError: it can't be read.
    """

    def __init__(self, folder: Storage, *, modules: Collection[str] = ()) -> None:
        self.folder = folder
        self.modules = modules
        self.bundle: Bundle = verify_bundle(folder)

    @property
    def step(self) -> int:
        """The incident's."""
        return self.bundle.step

    @cached_property
    def incident(self) -> Incident:
        """What happened."""
        return incident_of(self.folder, self.bundle)

    @cached_property
    def spec(self) -> JobSpec:
        """The run's job; `left_out` names the fields whose values are not here."""
        what = f"{self.folder.uri}/{names.SPEC_FILE}"
        data = read_file(self.folder, self.bundle, names.SPEC_FILE)
        if len(data) > MAX_SPEC_BYTES:
            raise BundleError(f"{what} has {len(data)} bytes; at most {MAX_SPEC_BYTES} are read")
        with strict.refusing(what):
            text = data.decode("utf-8")
            _refuse_odd_yaml(text, what)
            return parse_spec_text(text, source=what)

    @property
    def left_out(self) -> tuple[str, ...]:
        """Fields of the job that were secret, as `args.token`: to be given before a replay."""
        return self.bundle.left_out

    @property
    def numerics(self) -> Mapping[str, Any]:
        """Of the attempt that took the step."""
        return self.bundle.numerics

    @property
    def provenance(self) -> Mapping[str, Any]:
        """Where the bundle was made; for messages only."""
        bundle = self.bundle
        return {
            **bundle.provenance,
            "samestep": bundle.samestep_version,
            "environment": dict(bundle.environment),
            "missing": list(bundle.missing),
            "state_source": str(bundle.state_source),
        }

    def start(self) -> Start:
        """The state that was kept.

        Raises:
            BundleError: it is damaged, or holds something odd.
        """
        what = f"the state in {self.folder.uri}"
        with strict.refusing(what):
            state, _ = read_folder(
                self.folder.child(names.BUNDLE_STATE_DIR), self.bundle.state_step
            )
            rest = _rest_of(state.extras.pop(HELD_KEY), what)
            return Start(state=state, rest=rest)

    def plans(self, step: int) -> list[ShardPlan]:
        """All shards of a step, as they were when the bundle was made.

        Raises:
            CannotReplayError: the bundle does not hold which samples the step takes.
        """
        samples = self._samples(step)
        if samples is None:
            raise CannotReplayError(
                f"the bundle does not hold which samples step {step} takes{self._why}: give the "
                "workload's data"
            )
        return [shard.plan for shard in samples.shards]

    def has_samples(self, step: int) -> bool:
        """Whether every shard's batch of a step is here."""
        return step in self.bundle.sample_steps

    def batch(self, plan: ShardPlan) -> Any:
        """A shard's batch as `collate` made it, on the CPU, in new objects.

        Raises:
            CannotReplayError: it is not here.
            BundleError: it is malformed, or of a class that the workload's modules don't have.
        """
        samples = self._samples(plan.step)
        kept = samples.shards[plan.shard] if samples and plan.shard < len(samples.shards) else None
        if samples is None or kept is None or kept.text is None:
            why = f": {kept.why}" if kept is not None and kept.why else self._why
            raise CannotReplayError(
                f"the samples of step {plan.step}, shard {plan.shard} are not in the bundle{why}. "
                "Give the workload's data, where it can be read"
            )
        return samples.batch(plan.shard, modules=self.modules)

    def records(self) -> Mapping[int, StepRecord]:
        """Lines of the ledger from before the state on, and what the step itself came to."""
        found = {record.step: record for record in self._lines if isinstance(record, StepRecord)}
        if names.BUNDLE_STEP_FILE in self.bundle.files and self.step not in found:
            for record in self._read_lines(names.BUNDLE_STEP_FILE):
                if isinstance(record, StepRecord) and record.step == self.step:
                    found[self.step] = record
        return found

    def events(self) -> list[EventRecord]:
        """Events of the run around the step, in the order of writing."""
        return [record for record in self._lines if isinstance(record, EventRecord)]

    @property
    def _why(self) -> str:
        told = [text for text in self.bundle.missing if text.startswith("samples")]
        return f" ({'; '.join(told)})" if told else ""

    @cached_property
    def _lines(self) -> list[StepRecord | EventRecord]:
        return self._read_lines(names.BUNDLE_LEDGER_FILE)

    def _read_lines(self, name: str) -> list[StepRecord | EventRecord]:
        what = f"{self.folder.uri}/{name}"
        found: list[StepRecord | EventRecord] = []
        for text in read_file(self.folder, self.bundle, name).splitlines():
            line = strict.read_json(text, what)
            if type(line) is not dict or line.get("type") not in KINDS:
                raise BundleError(f"{what} has a line that is none of a ledger")
            with strict.refusing(what):
                problem = malformed(line)
                if problem:
                    raise BundleError(f"{what}: {problem}")
                if line["type"] == STEP:
                    found.append(_checked(StepRecord.from_json(line), what))
                elif line["type"] == EVENT:
                    found.append(EventRecord.from_json(line))
        return found

    def _samples(self, step: int) -> StepSamples | None:
        prefix = names.BUNDLE_SAMPLES_DIR
        text, tensors = (f"{prefix}/{sample_file(step, kind)}" for kind in ("json", "safetensors"))
        if step < 0 or text not in self.bundle.files:
            return None
        if self._kept is None or self._kept[0] != step:  # one at a time: they may be large
            has_tensors = tensors in self.bundle.files
            found = StepSamples.from_files(
                read_file(self.folder, self.bundle, text),
                read_file(self.folder, self.bundle, tensors) if has_tensors else None,
                step=step,
            )
            self._kept = (step, found)
        return self._kept[1]

    _kept: tuple[int, StepSamples] | None = None


@contextmanager
def unpacked(file: Path) -> Iterator[Storage]:
    """The folder of a packed bundle, as long as it is used.

    Raises:
        BundleError: the file is damaged, or no packed bundle.
        InputError: it can't be read.
    """
    with scratch_folder("bundle") as folder:
        target = folder / "bundle"
        unpack(file, target)
        yield Storage.at(str(target))


def _refuse_odd_yaml(text: str, what: str) -> None:
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        # An alias may stand for an alias of aliases, and so for more than any memory holds.
        if isinstance(event, yaml.AliasEvent):
            raise BundleError(f"{what} has an alias; a job that was kept has none")
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > strict.MAX_DEPTH:
            raise BundleError(f"{what} is nested more than {strict.MAX_DEPTH} levels deep")


_NONE: Final = type(None)
_REST: Final[Mapping[str, strict.Kinds]] = {
    "stage": int,
    "begun": bool,
    "values": (dict, _NONE),
    "evaluation": (dict, _NONE),
    "is_best": bool,
    "best": (tuple, _NONE),
}


def _rest_of(data: Any, what: str) -> Rest:
    rest = strict.fields(data, what, _REST)
    if rest["stage"] not in list(Stage):
        raise BundleError(f"{what}: there is no stage {rest['stage']}")
    if rest["best"] is not None and [type(part) for part in rest["best"]] != [int, float]:
        raise BundleError(f"{what}: best is {rest['best']!r}")
    return Rest.from_extras(rest)


def _checked(record: StepRecord, what: str) -> StepRecord:
    """Numbers where there should be numbers: what is compared with them must not be text."""
    listed = [*record.shard_losses, *record.shard_weights, *record.lr]
    numbers = [record.loss, record.grad_norm, *listed, *record.metrics.values()]
    if any(type(number) not in (float, int, _NONE) for number in numbers):
        raise BundleError(f"{what}: step {record.step} has a value that is no number")
    return record
