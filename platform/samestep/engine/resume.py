"""Where an attempt starts: the newest whole state there is, the same on every worker, or step 0.

Every worker tells which states it could give (`Offer`); all choose by the same rule, so nobody has
to be asked. A survivor's state is sent to those that lack it over the process group.
"""

from __future__ import annotations

import itertools
import logging
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from samestep.checkpoint import snapshot
from samestep.checkpoint.committed import best_of, committed_digest, list_checkpoints
from samestep.checkpoint.ranking import Ranking
from samestep.checkpoint.reading import Damaged, Loaded, load_checkpoint, newest_whole, set_aside
from samestep.checkpoint.state import State, restore
from samestep.checkpoint.storage import Storage
from samestep.engine import survivor
from samestep.engine.appraisal import Best
from samestep.engine.detection import STATE_KEY
from samestep.engine.handover import hand_over
from samestep.engine.offers import Choice, Offer, Source, Way, choose, left_out_before
from samestep.engine.peers import Peers
from samestep.engine.setup import Built
from samestep.engine.survivor import HELD_KEY, Held, Rest, Stage
from samestep.errors import CheckpointError, PeerLostError, RunConflictError, SamestepError
from samestep.exact.ranges import NONE, StepRanges
from samestep.incidents.record import Incident
from samestep.incidents.rollback import Rollback
from samestep.names import IncidentKind
from samestep.spec import JobSpec
from samestep.telemetry.link import MAX_BATCH, Target

logger = logging.getLogger(__name__)

SETTLED = Rest(stage=Stage.SETTLED, begun=False)


@dataclass(frozen=True, kw_only=True)
class Saved:
    """Where to start.

    Attributes:
        step: steps taken so far.
        nominal_weight: of the run's shards, if it is known yet.
        source: where the state came from; None at the start of a run.
        digest: of the checkpoint of this very state; None where there is none.
        early_stop: the count of evaluations without improvement, as the state has it.
        detection: what steps are judged by, as the state has it.
        rest: where between two updates the state was taken.
        left_out: steps whose batches the run leaves out, before and after it.
        num_rollbacks: of the run so far.
    """

    step: int
    nominal_weight: float | None
    source: Source | None = None
    digest: str | None = None
    early_stop: Mapping[str, Any] | None = None
    detection: Mapping[str, Any] | None = None
    rest: Rest = field(default=SETTLED)
    left_out: StepRanges = NONE
    num_rollbacks: int = 0


class Resumption:
    """Finds where to start.

    Args:
        spec: the job.
        run: the run directory.
        peers: the other workers.
        target: the run's recorder, told of damaged checkpoints.
        status: of the recorder: its present attempt, the steps in its ledger, the run's rollbacks.
    """

    def __init__(
        self,
        spec: JobSpec,
        *,
        run: Storage,
        peers: Peers,
        target: Target,
        status: Mapping[str, Any],
    ) -> None:
        self._spec = spec
        self._run = run
        self._peers = peers
        self._target = target
        self._attempt = int(status["attempt"])
        self._num_steps = int(status["step"])
        committed = status.get("last_checkpoint")
        self._committed = None if committed is None else int(committed["step"])
        self._way = self._way_by(status["rollbacks"])
        self._held = self._usable(survivor.held(run.uri))
        self._held_in = Source.SURVIVOR
        self._choice = Choice(offer=None)
        self._loaded: tuple[State, str] | None = None
        self._best_so_far: Best | None = None
        self._restored: State | None = None

    def choose(self) -> None:
        """Agrees with the other workers on what to start from.

        What a survivor has that may be missing in the ledger is delivered here, before an attempt
        begins behind it.

        Raises:
            CheckpointError: none is whole.
            PeerLostError: another worker could not do its part.
        """
        rollbacks = [each.to_json() for each in self._way.rollbacks]
        steps = snapshot.steps(self._run.uri) if self._held is None else []
        everyone = self._told(self._offers() | {"rollbacks": rollbacks, "snapshots": steps})
        # One that comes in just now is known to some only: worker 0's word counts, and the
        # recorder takes no attempt that does not know the last.
        self._way = self._way_by(everyone[0]["rollbacks"])
        self._choice = self._choose(everyone)
        newest = max((step for told in everyone for step in told["snapshots"]), default=-1)
        if newest >= 0 and Offer(kind=Source.SNAPSHOT, step=newest).rank > self._choice.rank:
            if steps:  # only now, since to read one takes longer than all else here
                self._held, self._held_in = self._usable(self._from_snapshot()), Source.SNAPSHOT
            self._choice = self._choose(self._told(self._offers()))
        if self._choice.offer is None or self._choice.offer.kind is Source.CHECKPOINT:
            self._choose_checkpoint()
            return
        if self._choice.offer.kind is Source.SNAPSHOT:
            self._choose_best()
        if self._peers.world_rank == self._choice.holders[0]:
            assert self._held is not None
            held = self._held
            self._told({}, lambda: self._deliver(held))
        else:
            self._told({})

    def built(self) -> Built | None:
        """The objects of the attempt before, where they hold the very state that was chosen."""
        if not self._holds_choice or self._held is None:
            return None
        return self._held.built

    def restore(self, built: Built) -> Saved:
        """Puts the chosen state into a worker's objects.

        Raises:
            CheckpointError: it does not fit the workload.
            RunConflictError: the data is another than the state's.
        """
        offer = self._choice.offer
        left_out, num_rollbacks = self._way.left_out, len(self._way.rollbacks)
        if offer is None:
            return Saved(
                step=0, nominal_weight=None, left_out=left_out, num_rollbacks=num_rollbacks
            )
        digest: str | None = None
        if offer.kind is not Source.CHECKPOINT:
            own = self._held.state if self._holds_choice and self._held is not None else None
            state = hand_over(own, holders=self._choice.holders, peers=self._peers)
            # One worker looks for all: what was committed last, another may not have been told.
            found = committed_digest(self._run, offer.step) if self._peers.world_rank == 0 else None
            digest = self._peers.gather(found)()[0]
        else:
            if self._loaded is None:
                loaded, manifest = load_checkpoint(self._run, offer.step)
                self._loaded = (loaded, manifest.digest)
            state, digest = self._loaded
        extras = state.extras
        if extras["dataset_size"] != built.dataset_size:
            raise RunConflictError(
                f"the training data has {built.dataset_size} samples, the state at step "
                f"{state.step} of {self._run.uri} was made with {extras['dataset_size']}: other "
                "data is another run; give it another --name, or restore the data"
            )
        if self.built() is None:
            restore(state, built.parts)
            self._restored = state
        if offer.kind is Source.SURVIVOR:
            rest = Rest.from_extras(extras[HELD_KEY])
        else:
            # One at step 0 was taken after before_step(0).
            rest = Rest(stage=Stage.SETTLED, begun=state.step == 0, best=self._best_so_far)
        return Saved(
            step=state.step,
            nominal_weight=extras["nominal_weight"],
            source=offer.kind,
            digest=digest,
            early_stop=extras.get("early_stop"),
            detection=extras.get(STATE_KEY),
            rest=rest,
            left_out=left_out,
            num_rollbacks=num_rollbacks,
        )

    def restore_again(self, built: Built) -> None:
        """Puts the tensors back to the state's, after `before_step` was called once more.

        The state was taken after that call had changed the model; what else the call does (to
        what is frozen, to the workload itself) is done by calling it.
        """
        if self._restored is not None:
            restore(self._restored, built.parts)

    def keep(self, built: Built, saved: Saved) -> None:
        """From now on this worker holds the state too, whoever had it before."""
        if saved.source is not Source.SURVIVOR or self._restored is None:
            return
        survivor.hold(
            Held(run_uri=self._run.uri, attempt=self._attempt, state=self._restored, built=None)
        )

    def release(self) -> None:
        """Lets go of states once they are in the objects."""
        self._held = self._loaded = self._restored = None

    def _way_by(self, rollbacks: Sequence[Mapping[str, Any]]) -> Way:
        return Way(self._spec.incidents.leave_out, [Rollback.from_json(each) for each in rollbacks])

    def _usable(self, held: Held | None) -> Held | None:
        """What is held, unless others have gone on from elsewhere while the ledger lacks steps.

        Records of the present attempt can still be delivered; those of an earlier one can't.
        """
        if held is None or (held.attempt != self._attempt and held.state.step > self._num_steps):
            return None
        offer = Offer.of(held, Source.SURVIVOR)
        return held if self._way.holds(offer, self._attempt) else None

    def _from_snapshot(self) -> Held | None:
        """The newest snapshot in this node's shared memory, as if this process had held it."""
        for step in snapshot.steps(self._run.uri):
            try:
                loaded = snapshot.load(self._run.uri, step)
            except CheckpointError as error:
                logger.warning("attempt=%d %s", self._attempt, error)
                continue
            if loaded.attempt > self._attempt:
                continue  # of a run of this name that was started over since
            loaded.state.extras[HELD_KEY] = SETTLED.to_extras()
            if not self._way.fits(step, left_out_before(loaded.state)):
                continue  # of steps that were taken back
            return Held(
                run_uri=self._run.uri,
                attempt=loaded.attempt,
                state=loaded.state,
                built=None,
                records=tuple(loaded.records),
            )
        return None

    @property
    def _holds_choice(self) -> bool:
        offer = self._choice.offer
        return (
            offer is not None
            and offer.kind is not Source.CHECKPOINT
            and self._peers.world_rank in self._choice.holders
        )

    def _choose(self, everyone: Sequence[Mapping[str, Any]]) -> Choice:
        offers = [list(map(Offer.from_json, told["offers"])) for told in everyone]
        return choose(
            [[each for each in mine if self._way.holds(each, self._attempt)] for mine in offers]
        )

    def _offers(self) -> dict[str, Any]:
        offers = []
        if self._held is not None:
            offers.append(Offer.of(self._held, self._held_in))
        if self._peers.world_rank == 0:
            offers += [
                Offer(kind=Source.CHECKPOINT, step=info.step)
                for info in list_checkpoints(self._run)
                if info.whole
            ]
        return {"offers": [each.to_json() for each in offers]}

    def _told(
        self, message: dict[str, Any], act: Callable[[], None] = lambda: None
    ) -> list[dict[str, Any]]:
        """Acts, and gathers; what fails in one worker is an error in all."""
        failure: SamestepError | None = None
        try:
            act()
        except SamestepError as error:
            failure, message = error, {"error": str(error)}
        everyone: list[dict[str, Any]] = self._peers.gather(message)()
        if failure is not None:
            raise failure
        for rank, told in enumerate(everyone):
            if "error" in told:
                raise PeerLostError(f"worker {rank} can't resume: {told['error']}")
        return everyone

    def _deliver(self, held: Held) -> None:
        """Brings into the ledger what a dead worker may not have sent; what is there stays once."""
        if held.attempt == self._attempt:
            sender, records = f"late-{uuid.uuid4().hex}", iter(held.records)
            for sequence in itertools.count(1):
                batch = list(itertools.islice(records, MAX_BATCH))
                if not batch:
                    break
                self._target.call("push", held.attempt, sender, sequence, batch)

    def _choose_checkpoint(self) -> None:
        """The newest whole checkpoint that worker 0 sees."""
        message: dict[str, Any] = {}

        def look() -> None:
            self._loaded = self._newest()
            step = self._loaded[0].step if self._loaded else None
            message.update(step=step, best=None if step is None else self._best(step))

        told = self._told(message, look if self._peers.world_rank == 0 else lambda: None)[0]
        step = told["step"]
        offer = None if step is None else Offer(kind=Source.CHECKPOINT, step=step)
        self._choice = Choice(offer=offer, holders=(0,))
        self._take_best(told["best"])

    def _choose_best(self) -> None:
        """A snapshot does not hold which checkpoint is the best so far."""
        offer, message = self._choice.offer, dict[str, Any]()
        assert offer is not None

        def look() -> None:
            message["best"] = self._best(offer.step)

        told = self._told(message, look if self._peers.world_rank == 0 else lambda: None)[0]
        self._take_best(told["best"])

    def _take_best(self, told: Sequence[float] | None) -> None:
        if told:
            self._best_so_far = (int(told[0]), float(told[1]))

    def _best(self, step: int) -> Best | None:
        """The best checkpoint up to the one restored, by what the job ranks by now."""
        ranking = Ranking.of(self._spec.checkpoint.best)
        if ranking is None:
            return None
        until = [info for info in list_checkpoints(self._run) if info.step <= step]
        best = best_of(until, ranking)
        score = ranking.score_of(best) if best is not None else None
        return (best.step, score) if best is not None and score is not None else None

    def _newest(self) -> tuple[State, str] | None:
        found, rejected = self._newest_on_the_way()
        # One whose writer was killed has no manifest: it never was a checkpoint, by the ledger too.
        damaged = [d for d in rejected if not d.unfinished or d.step == self._committed]
        lines = []
        for item in damaged:
            incident = Incident(
                kind=IncidentKind.DAMAGED_CHECKPOINT,
                step=item.step,
                attempt=self._attempt,
                world_rank=0,
                host=os.uname().nodename,
                time=time.time(),
                message=f"checkpoint at step {item.step} rejected: {item.reason}",
                evidence=[set_aside(self._run, item) if found is not None else item.uri],
            )
            self._target.call("record_incident", self._attempt, incident.to_json())
            lines.append(incident.message)
        if found is None and self._committed is not None and not damaged:
            lines.append(f"the ledger tells of one at step {self._committed}, which is not there")
        if found is None and lines:
            raise CheckpointError(
                f"no checkpoint of {self._run.uri} is whole: " + "; ".join(lines) + "; nothing "
                "was deleted. Start over from step 0 with --restart, or restore one of them"
            )
        return (found.state, found.manifest.digest) if found else None

    def _newest_on_the_way(self) -> tuple[Loaded | None, list[Damaged]]:
        """The newest whole checkpoint that is no remains of steps which were taken back."""
        offer = self._choice.offer
        found, rejected = newest_whole(self._run, None if offer is None else offer.step)
        while found is not None and not self._way.fits(found.step, left_out_before(found.state)):
            found, more = newest_whole(self._run, found.step - 1)
            rejected += more
        return found, rejected
