"""How soon the bundle of an incident is whole, and what the other workers notice of it.

The detectors of every worker are told a loss that stands out, and training goes on, as by default.
"""

from __future__ import annotations

import itertools
import statistics
import time
from functools import partial
from typing import Any

from contenders import CPU
from incidents import Task, Training, training_of
from saves import torch_save
from torch import Tensor

from samestep.checkpoint.state import State, collect
from samestep.engine.evidence import Evidence, settle
from samestep.engine.feed import Fetcher
from samestep.engine.survivor import HELD_KEY, Rest, Stage
from samestep.exact import numerics
from samestep.incidents.bundle import StateSource
from samestep.incidents.record import Incident
from samestep.names import BUNDLE_FILE, INCIDENTS_DIR

# Told the spike at once, and nothing else.
DETECTORS = {"least": 4, "spike_score": 1e5}
WARM_UP_STEPS = 10
USUAL_STEPS = 20
SPIKE = 1e9


def bundles(task: Task) -> dict[str, Any]:
    """Seconds by what they are of, one an incident; `state_bytes`.

    `bundle_s` is from the incident to the file that makes its bundle whole, `copy_s` and
    `torch_save_s` are of the same state, in memory and to the same disk, and `held_up_s` is that
    for which worker 0 trains no further. Of the last worker: `usual_s` is the median of its steps
    before, `longest_usual_s` the longest, and `longest_s` that from the incident to the bundle's
    end.
    """
    found: dict[str, Any] = {"bundle_s": [], "held_up_s": [], "copy_s": []}
    found |= {"usual_s": [], "longest_usual_s": [], "longest_s": []}
    with training_of(task, incidents=DETECTORS) as training:
        kept, numbers, peers = _Kept(training), itertools.count(), training.peers

        def take(loss: float | None = None) -> float:
            training.watched.step(next(numbers), loss)
            return time.perf_counter()

        def is_writing() -> bool:
            return any(peers.gather(not settle(0))())

        for _ in range(WARM_UP_STEPS):
            take()
        for _ in range(task["rounds"]):
            times = [time.perf_counter()]
            for _ in range(USUAL_STEPS):
                times.append(take())
                is_writing()
            times.append(take(SPIKE))
            while is_writing():
                times.append(take())
            steps_s = [after - before for before, after in itertools.pairwise(times)]
            usual_s, meanwhile_s = steps_s[:USUAL_STEPS], steps_s[USUAL_STEPS:]
            own = [statistics.median(usual_s), max(usual_s), max(meanwhile_s)]
            names = ("usual_s", "longest_usual_s", "longest_s")
            for name, value in zip(names, peers.gather(own)()[-1], strict=True):
                found[name].append(value)
            tensors = kept.tensors()
            if peers.world_rank == 0:
                found["bundle_s"].append(kept.bundle_s())
                found["held_up_s"].append(kept.held_up_s)
                found["copy_s"].append(_copy_s(tensors))
            peers.gather("together")()
        found["torch_save_s"] = torch_save(tensors, peers, training.folder, task["rounds"])
    found["state_bytes"] = sum(tensor.nbytes for tensor in tensors.values())
    return found


class _Kept:
    """Keeps evidence of each incident, as the training loop does in worker 0."""

    def __init__(self, training: Training) -> None:
        self.held_up_s = 0.0
        self._training = training
        self._exact = exact = training.exact
        self._evidence = Evidence(
            spec=exact.spec,
            built=exact.built,
            fetcher=Fetcher(exact.built.workload, exact.built.dataset, exact.spec.seed),
            run=training.run,
            target=training.target,
            fingerprint=numerics.fingerprint(exact.spec, CPU.type),
        )
        training.watched.keep = self._keep

    def state(self, step: int) -> State:
        """The live one, before a step."""
        rest = Rest(stage=Stage.SETTLED, begun=True)
        extras = {HELD_KEY: rest.to_extras(), **self._training.watched.detection.state}
        return collect(self._exact.built.parts, step=step, extras=extras)

    def tensors(self) -> dict[str, Tensor]:
        """Those of the state."""
        return self.state(0).tensors

    def bundle_s(self) -> float:
        """From the last incident to the end of its bundle; fails where it has none."""
        folder = self._training.folder / "run" / INCIDENTS_DIR / self._incident.id
        # The time of its last change of name: it is written under another, and synced.
        return (folder / BUNDLE_FILE).stat().st_ctime - self._incident.time

    def _keep(self, incident: Incident, records: Any) -> None:
        self._incident = incident
        began_s = time.perf_counter()
        with self._exact.engine.main.keeper.as_before():
            self._evidence.keep(
                incident,
                partial(self.state, incident.step),
                source=StateSource.LIVE,
                if_idle=True,
                records=records,
            )
        self.held_up_s = time.perf_counter() - began_s


def _copy_s(tensors: dict[str, Tensor]) -> float:
    began_s = time.perf_counter()
    copies = [tensor.clone() for tensor in tensors.values()]
    copied_s = time.perf_counter() - began_s
    del copies
    return copied_s
