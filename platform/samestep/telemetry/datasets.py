"""What is told of a workload's data without keeping any of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from samestep.errors import RecorderError

TRAINING: Final = "training"
EVALUATION: Final = "evaluation"


@dataclass(frozen=True, kw_only=True)
class DatasetInfo:
    """A dataset's fingerprint: equal for equal data, as far as was looked.

    Attributes:
        context: training or evaluation.
        kind: the dataset's class, with its module.
        size: number of samples.
        num_sampled: samples whose content the digest covers; 0: none of them could be hashed, so
            that it covers class and size alone.
        digest: 32 hex digits.
    """

    context: str
    kind: str
    size: int
    num_sampled: int
    digest: str

    def to_json(self) -> dict[str, Any]:
        """As plain JSON data."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> DatasetInfo:
        """Inverse of `to_json`.

        Raises:
            RecorderError: a field is missing or unknown.
        """
        try:
            return cls(**data)
        except TypeError as error:
            raise RecorderError(f"a dataset's fingerprint is malformed: {error}") from error
