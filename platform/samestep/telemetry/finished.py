"""What a run that is done hands to whoever keeps its models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, kw_only=True)
class Finished:
    """The end of a run, in worker 0.

    Attributes:
        model: the trained model, without any wrapper; with the averages of its weights in it,
            where there are any.
        use: calls the model once, as an evaluation of the workload does.
        code: the file that defines the workload, if there is one.
        best_weights: reads the state_dict of the best checkpoint, the averages where there are
            any; None where there is no best one, or where it is the last.
    """

    model: nn.Module
    use: Callable[[], object]
    code: Path | None
    best_weights: Callable[[], Mapping[str, Any] | None]
