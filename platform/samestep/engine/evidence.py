"""What is kept of an incident while training goes on, so that its step can be taken again anywhere.

Training waits for a copy of the state and for a fork; the rest is done behind it (`bundling`,
`rereading`). Whatever goes wrong with it is told once, and changes nothing for the run.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from samestep.checkpoint.committed import list_checkpoints
from samestep.checkpoint.reading import load_checkpoint
from samestep.checkpoint.state import State
from samestep.checkpoint.storage import Storage
from samestep.engine.aftermath import is_aftermath
from samestep.engine.bundling import (
    MANIFEST_BYTES,
    Bundling,
    Copied,
    Material,
    give_up,
    ledger_bytes,
    state_bytes,
)
from samestep.engine.feed import Fetcher
from samestep.engine.final_model import module_file
from samestep.engine.rereading import Rereading
from samestep.engine.setup import Built
from samestep.engine.survivor import HELD_KEY, Rest, Stage
from samestep.errors import BundleError, SamestepError
from samestep.incidents.bundle import StateSource
from samestep.incidents.record import Incident
from samestep.incidents.redaction import Redaction
from samestep.names import IncidentKind
from samestep.spec import JobSpec
from samestep.telemetry.link import Target
from samestep.telemetry.records import StepRecord

BUNDLE_S: Final = 60.0
"""How long a bundle under way is waited for where it would be lost else."""
HURRY_S: Final = 5.0
"""The same at a planned stop, which may have little time."""
MAX_STEPS: Final = 500
"""Steps between the state and the incident whose samples are kept at most."""
MAX_RECORDS: Final = 20_000
"""Ledger records that are kept at most: the newest."""

logger = logging.getLogger(__name__)

_under_way: list[Bundling] = []
_lock = threading.Lock()


class Evidence:
    """Keeps evidence in one worker of an attempt.

    Nothing here leads back to the process group (see `Keeping`).

    Args:
        spec: the job.
        built: what the workload gave.
        fetcher: reads its samples.
        run: the run directory.
        target: the recorder.
        fingerprint: of the attempt's numerics.
    """

    def __init__(
        self,
        *,
        spec: JobSpec,
        built: Built,
        fetcher: Fetcher,
        run: Storage,
        target: Target,
        fingerprint: Mapping[str, Any],
    ) -> None:
        self._spec = spec
        self._order = built.order
        self._fetcher = fetcher
        self._run = run
        self._target = target
        self._fingerprint = fingerprint
        self._module = module_file(built.workload)
        self._is_full = spec.incidents.bundle.keep == 0
        self._found_at: dict[IncidentKind, int] = {}
        self._waiting: Callable[[], None] | None = None

    def keep(
        self,
        incident: Incident,
        state_of: Callable[[], State],
        *,
        source: StateSource,
        wants_samples: bool = True,
        if_idle: bool = False,
        later: bool = False,
        record: StepRecord | None = None,
        records: Iterable[Mapping[str, Any]] = (),
    ) -> None:
        """Copies what there is now, and writes the incident's bundle behind the training.

        To be called by the thread that trains. Never raises.

        Args:
            incident: as recorded, with its id.
            state_of: gives the state of the incident's step or of one before, or of what happened
                behind its update (`aftermath`) that right after it, with a `Rest`; called only if
                there shall be a bundle.
            source: where that state comes from.
            wants_samples: the samples of the steps from the state's to the incident's are read, or
                of the incident's alone where the state is from behind it.
            if_idle: no bundle while another is under way, nor for what is found in one step after
                another: copies would fill memory and disk.
            later: all but the copy waits for `go_on`.
            record: what the step came to.
            records: records of the attempt that may not be in the ledger yet.
        """
        self.go_on()
        if if_idle and not self._is_worth_it(incident):
            return
        if self._is_full or not incident.id:
            return
        token = ""
        try:
            answer = self._target.call("claim_bundle", incident.id)
            self._is_full = answer["why"] == "full"
            if answer["token"] is None:
                return
            token = str(answer["token"])
            state = state_of()
            is_behind = state.step == incident.step + 1 and is_aftermath(incident)
            if state.step > incident.step and not is_behind:  # too late: its state is gone
                self._target.call("drop_bundle", incident.id, token)
                return
            copied, room_bytes = self._copied(state)
            first = min(state.step, incident.step)
            wants_samples = wants_samples or is_behind
            steps, missing = _wanted_steps(first, incident.step if wants_samples else -1)
            material = Material(
                incident=incident,
                token=token,
                spec=self._spec,
                copied=copied,
                source=source,
                samples=None,
                record=record,
                records=list(deque(records, maxlen=MAX_RECORDS)),
                numerics=self._fingerprint,
                module=self._module,
                missing=missing,
            )
        except Exception as error:  # of user code too, in what the state consists of
            give_up(self._target, incident.id, token, error)
            return
        self._waiting = partial(self._write, material, steps, room_bytes)
        if not later:
            self.go_on()

    def go_on(self) -> None:
        """Starts writing what was only copied yet; never raises."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting()

    def keep_behind(
        self,
        incident: Incident,
        state_of: Callable[[], State],
        *,
        records: Iterable[Mapping[str, Any]],
    ) -> None:
        """Keeps evidence of what was found after an update; never raises.

        The state before the step is gone, so it is that of the newest checkpoint before it, from
        where on the samples of all steps are kept; where there is none, the state at hand.

        Args:
            incident: as recorded, with its id.
            state_of: gives the state at hand, with a `Rest`.
            records: records of the attempt that may not be in the ledger yet.
        """
        try:
            whole = [info.step for info in list_checkpoints(self._run) if info.whole]
        except SamestepError as error:  # storage is away: the bundle may come through yet
            logger.warning("which checkpoints there are is not known: %s", error)
            whole = []
        before = max((step for step in whole if step <= incident.step), default=None)
        self.keep(
            incident,
            state_of if before is None else partial(_state_saved, self._run, before),
            source=StateSource.LIVE if before is None else StateSource.CHECKPOINT,
            if_idle=True,
            records=records,
        )

    def catch_up(self, step: int, state_of: Callable[[], State], source: StateSource) -> None:
        """Keeps evidence of the last incident that nobody could keep any of; never raises.

        Args:
            step: steps taken before the state at hand.
            state_of: gives that state.
            source: where it comes from.
        """
        if self._is_full:
            return
        try:
            told = self._target.call("lacking_bundles")
        except Exception as error:  # the recorder is away: it is asked again by the next attempt
            logger.warning("which incidents lack a bundle is not known: %s", error)
            return
        lacking = [Incident.from_json(data) for data in told]
        ahead = [incident for incident in lacking if incident.step >= step]
        if ahead:
            last = max(ahead, key=lambda one: (one.attempt, one.time))
            # The others wait for this worker's step, which a fork and a writer slow down.
            self.keep(last, state_of, source=source, later=True)

    def finish(self, *, hurries: bool = False) -> None:
        """Waits for what is under way in this process, before it is too late; bounded."""
        self.go_on()
        limit_s = HURRY_S if hurries else BUNDLE_S
        settle(min(limit_s, self._spec.faults.hang_timeout_s / 2))

    def _is_worth_it(self, incident: Incident) -> bool:
        before = self._found_at.get(incident.kind)
        self._found_at[incident.kind] = incident.step
        return before != incident.step - 1 and settle(0)

    def _write(self, material: Material, steps: Sequence[int], room_bytes: int) -> None:
        try:
            samples = self._reading(steps, room_bytes) if steps else None
            whole = replace(material, samples=samples)
            bundling = Bundling(whole, run=self._run, target=self._target)
        except Exception as error:  # of user code too, in how samples are read
            give_up(self._target, material.incident.id, material.token, error)
            return
        with _lock:
            _under_way[:] = [other for other in _under_way if not other.wait(0)]
            _under_way.append(bundling)

    def _copied(self, state: State) -> tuple[Copied, int]:
        """A copy of the state, and what is left of the limit for samples."""
        limit, needed = self._spec.incidents.bundle.max_bytes, state_bytes(state)
        if needed > limit - MANIFEST_BYTES:
            raise BundleError(
                f"the state alone takes about {needed} bytes, and incidents.bundle.max_bytes is "
                f"{limit}"
            )
        return Copied(state), limit - needed - MANIFEST_BYTES - ledger_bytes(limit)

    def _reading(self, steps: Sequence[int], room_bytes: int) -> Rereading:
        redact = Redaction(self._spec).text
        return Rereading(
            self._fetcher, self._order.shards_of, steps, max_bytes=room_bytes, redact=redact
        )


def _state_saved(run: Storage, step: int) -> State:
    state, _ = load_checkpoint(run, step)
    # A checkpoint at step 0 was taken after before_step(0).
    state.extras[HELD_KEY] = Rest(stage=Stage.SETTLED, begun=step == 0).to_extras()
    return state


def settle(timeout_s: float) -> bool:
    """Waits until the bundles that this process writes are written; False: not in time."""
    end = time.monotonic() + timeout_s
    with _lock:
        waiting = list(_under_way)
    return all(bundling.wait(max(0.0, end - time.monotonic())) for bundling in waiting)


def _wanted_steps(first: int, last: int) -> tuple[list[int], list[str]]:
    """Steps whose samples are read: the incident's, then those that lead to it."""
    if last < first:
        return [], []
    steps = [last, *range(first, last)]
    if len(steps) <= MAX_STEPS:
        return steps, []
    return steps[:MAX_STEPS], [
        f"samples from step {steps[MAX_STEPS]} to {last - 1}: those of {MAX_STEPS} steps are kept"
    ]
