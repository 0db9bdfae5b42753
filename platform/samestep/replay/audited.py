"""An audit that failed, decided once more: whose digest of the gradient does this machine give?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from samestep.errors import CannotReplayError
from samestep.incidents.record import Incident
from samestep.names import IncidentKind


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What a worker computed in the run.

    Attributes:
        world_rank: the worker.
        host: its node; empty where that is not known.
        when: as a part of the step, beside it, or once more.
        digest: of the gradient.
    """

    world_rank: int
    host: str
    when: str
    digest: str

    def __str__(self) -> str:
        return f"worker {self.world_rank}{f' on {self.host}' if self.host else ''} ({self.when})"


@dataclass(frozen=True, kw_only=True)
class Audit:
    """What an incident tells of the audit that found it.

    Attributes:
        step: the step.
        shard: the shard whose gradients were looked at.
        computed: that shard, after the one it is added to in place, if there is one.
        parameter: the first whose gradient differed.
        disputed: the two that differ: the owner's and the auditor's.
        repeats: what every worker computed once more.
        right: digest of the worker that the run found right; None where it could not tell.
    """

    step: int
    shard: int
    computed: tuple[int, ...]
    parameter: str
    disputed: tuple[Claim, Claim]
    repeats: tuple[Claim, ...]
    right: str | None

    @classmethod
    def in_incident(cls, incident: Incident | None, *, num_shards: int) -> Audit | None:
        """The audit that an incident tells of; None: it is of another kind.

        Args:
            incident: of a run or a bundle, which nobody has to trust.
            num_shards: of the job.

        Raises:
            CannotReplayError: it does not tell all that is needed.
        """
        if incident is None or incident.kind is not IncidentKind.CORRUPTION:
            return None
        try:
            return cls._parsed(incident, num_shards)
        except (KeyError, TypeError, ValueError) as error:
            raise CannotReplayError(
                f"the incident does not tell what was audited ({error!r}), as those do that this "
                "samestep records: take its step again with samestep replay RUN --at STEP"
            ) from error

    @classmethod
    def _parsed(cls, incident: Incident, num_shards: int) -> Audit:
        seen = incident.seen
        shard = _whole(seen["shard"], below=num_shards)
        computed = tuple(_whole(number, below=num_shards) for number in seen["computed"])
        if computed not in ((shard,), (shard - 1, shard)):
            raise ValueError(f"shard {shard} is not computed by {computed}")
        hosts = [str(host) for host in seen["hosts"]]

        def claim(world_rank: Any, when: str, digest: Any) -> Claim:
            rank = _whole(world_rank, below=len(hosts))
            return Claim(world_rank=rank, host=hosts[rank], when=when, digest=str(digest))

        owned, audited = seen["digests"]
        return cls(
            step=incident.step,
            shard=shard,
            computed=computed,
            parameter=str(seen["parameter"]),
            disputed=(
                claim(seen["owner"], "as a part of the step", owned),
                claim(seen["auditor"], "beside it", audited),
            ),
            repeats=tuple(
                claim(rank, "once more", digest) for rank, digest in enumerate(seen["repeats"])
            ),
            right=None if seen["right"] is None else str(seen["right"]),
        )


@dataclass(frozen=True, kw_only=True)
class Audited:
    """The audited gradient, computed here too.

    Attributes:
        audit: of the run.
        digest: of the gradient as it is here.
    """

    audit: Audit
    digest: str

    @classmethod
    def of(cls, audit: Audit, digests: Mapping[str, str]) -> Audited:
        """Takes the digest of the audited parameter out of all that were computed here.

        Raises:
            CannotReplayError: the model has no such parameter.
        """
        if audit.parameter not in digests:
            raise CannotReplayError(
                f"the model has no parameter {audit.parameter!r}, whose gradient was audited: give "
                "the folder of the run's code with --code"
            )
        return cls(audit=audit, digest=digests[audit.parameter])

    @property
    def right(self) -> Claim | None:
        """The one of the two whose digest is the one here; None: neither's is."""
        return next((each for each in self.audit.disputed if each.digest == self.digest), None)

    @property
    def wrong(self) -> tuple[Claim, ...]:
        """Those of the two whose digest is another than the one here."""
        return tuple(each for each in self.audit.disputed if each.digest != self.digest)

    @property
    def is_reproduced(self) -> bool:
        """One of the two is right by what is computed here, and the run did not say otherwise."""
        return self.right is not None and self.audit.right in (None, self.digest)

    def headline(self) -> str:
        """What this says about the two, in a line."""
        audit, right, wrong = self.audit, self.right, self.wrong
        what = f"the gradient of {audit.parameter} in shard {audit.shard} of step {audit.step}"
        others = " and ".join(f"{each.digest} by {each}" for each in wrong)
        if right is None:
            return f"not reproduced: {what} is {self.digest} here; in the run it was {others}"
        same = f"{what} is {self.digest}, as by {right}"
        if not self.is_reproduced:
            return f"not reproduced: {same}, whom the run found wrong; it was {others}"
        return f"reproduced bit for bit: {same}; {others} is wrong"

    def notes(self) -> list[str]:
        """What else there is to know, in lines."""
        audit = self.audit
        if self.right is None:
            return [
                "neither worker's digest comes out here: another machine may be wrong, or the "
                "code, the data or the numerics are others (a digest tells of bits alone)"
            ]
        if not self.is_reproduced:
            return ["most workers of the run got another digest than this machine does"]
        again = [each for each in audit.repeats if each.digest != self.digest]
        ranks = ", ".join(f"worker {each.world_rank}" for each in again)
        told = "computed once more, all workers of the run had this digest"
        if again:
            told = f"computed once more, it was another one again on {ranks}"
        unsure = ["the run itself could not tell which of them was wrong"]
        return [told, *(unsure if audit.right is None else [])]

    def to_json(self) -> dict[str, Any]:
        """As plain data."""
        audit = self.audit
        return {
            "shard": audit.shard,
            "parameter": audit.parameter,
            "digest": self.digest,
            "right": None if self.right is None else vars(self.right),
            "wrong": [vars(each) for each in self.wrong],
        }


def _whole(value: Any, *, below: int) -> int:
    if type(value) is not int or not 0 <= value < below:
        raise ValueError(f"{value!r} is no number from 0 to {below - 1}")
    return value
