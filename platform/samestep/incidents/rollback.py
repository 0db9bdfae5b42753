"""A rollback: the decision to go back to before some steps, and to leave their batches out.

Which steps follows from the step of the incident and the job alone. So it does not matter which
checkpoint the way back begins at: from whatever lies before them the same steps are taken again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from samestep.exact.ranges import StepRanges


@dataclass(frozen=True, kw_only=True)
class Rollback:
    """One of a run.

    Attributes:
        to: steps that stay taken; the batch of step `to` is the first that is left out.
        until: one past the last step that is left out: that of the incident.
        attempt: the attempt that it ended.
        message: what was found.
    """

    to: int
    until: int
    attempt: int
    message: str = ""

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Rollback:
        """Inverse of `to_json`; what a ledger holds beside is passed over."""
        return cls(
            to=int(data["to"]),
            until=int(data["until"]),
            attempt=int(data["attempt"]),
            message=str(data.get("message", "")),
        )

    def describe(self) -> str:
        """In a sentence, for people."""
        last = self.until - 1
        which = f"step {last}" if self.to == last else f"steps {self.to} to {last}"
        return f"went back to before step {self.to}: the batches of {which} are left out"


def left_out(told: Iterable[Sequence[int]], rollbacks: Iterable[Rollback]) -> StepRanges:
    """All steps whose batches a run leaves out.

    Args:
        told: by the job.
        rollbacks: of the run so far.
    """
    return StepRanges.of([*told, *((each.to, each.until) for each in rollbacks)])
