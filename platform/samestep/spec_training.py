"""The parts of the job spec about evaluating, keeping and choosing what was trained."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BeforeValidator, Field, model_validator

from samestep.spec_part import BITS, FREE, Part

MetricName = Annotated[str, Field(min_length=1)]
MetricOrder = Literal["min", "max"]
LATEST: Final = "latest"
BEST: Final = "best"


class Evaluate(Part):
    """When the evaluation data is gone through, and in which batches.

    Schedules, early stopping and the best checkpoint may hang on evaluations, so when they take
    place is fixed for the life of a run. The one at the end of a run that is not due by these
    fields decides nothing: it would not take place in a longer run.
    """

    every_epochs: int = Field(
        1,
        ge=0,
        description="evaluate after every so many epochs; 0: not by epochs (always at the end)",
        json_schema_extra=BITS,
    )
    every_steps: int = Field(
        0,
        ge=0,
        description="evaluate after every so many steps as well; 0: not by steps",
        json_schema_extra=BITS,
    )
    batch_size: int | None = Field(
        None,
        ge=1,
        description="samples per evaluation batch; null: ceil(batch_size / shards)",
        json_schema_extra=BITS,
    )


class Best(Part):
    """Which checkpoint is the best one; it is kept beside the newest ones."""

    metric: MetricName | None = Field(
        None,
        description=(
            "metric of the evaluation by which checkpoints are ranked; a new best is written at "
            "once. NaN is never best; null: there is no best"
        ),
        json_schema_extra=FREE,
    )
    order: MetricOrder = Field(
        "max", description="whether more or less is better", json_schema_extra=FREE
    )


class Checkpoint(Part):
    """When the state is written to storage, and how many are kept."""

    every_steps: int = Field(
        100,
        ge=0,
        description="commit a checkpoint every so many steps; 0: only at stops and at the end",
        json_schema_extra=FREE,
    )
    every_seconds: float = Field(
        0.0,
        ge=0,
        description=(
            "commit a checkpoint when so many seconds have passed since the last one began, by "
            "worker 0's clock; beside every_steps; 0: not by time"
        ),
        json_schema_extra=FREE,
    )
    keep: int = Field(
        3,
        ge=1,
        description="newest whole checkpoints to keep; the best one stays beside them",
        json_schema_extra=FREE,
    )
    snapshot_every: Literal["auto"] | Annotated[int, Field(ge=0)] = Field(
        "auto",
        description=(
            "copy the state into the nodes' shared memory (at most three times its size on each) "
            "every so many steps, for when all workers die at once; auto: as often as slows "
            "training by no more than 1 %; 0: never"
        ),
        json_schema_extra=FREE,
    )
    best: Best = Field(default_factory=Best, json_schema_extra=FREE)


class Ema(Part):
    """An exponential moving average of the weights.

    Where it is on, evaluation, the best checkpoint, `load_weights` and `init_from` use it.
    """

    decay: float | None = Field(
        None,
        ge=0,
        lt=1,
        description=(
            "after each applied update: average = decay * average + (1 - decay) * weights, in "
            "float32 or wider; null: no average"
        ),
        json_schema_extra=BITS,
    )


class EarlyStop(Part):
    """Ends the run when a metric of the evaluation no longer improves."""

    metric: MetricName | None = Field(
        None, description="metric to watch; null: no early stop", json_schema_extra=BITS
    )
    order: MetricOrder = Field(
        "min", description="whether more or less is better", json_schema_extra=BITS
    )
    patience: int = Field(
        3,
        ge=1,
        description=(
            "evaluations in a row without improvement that end the run; raise it to go on with "
            "one that stopped"
        ),
        json_schema_extra=FREE,
    )
    min_delta: float = Field(
        0.0,
        ge=0,
        description="an improvement is more than this much better than the best so far",
        json_schema_extra=BITS,
    )


def _which(value: object) -> object:
    is_step = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    if value not in (LATEST, BEST) and not is_step:
        raise ValueError(f"give {LATEST}, {BEST} or a number of steps")
    return value


class InitFrom(Part):
    """The weights to start from; `init_from: PATH` is short for `{path: PATH}`.

    Read once, before step 0. Optimizer, schedule and position start afresh.
    """

    path: str | None = Field(
        None,
        min_length=1,
        description=(
            "a run (directory, or name in storage) or the folder of a checkpoint; its average "
            "of weights where it has one; null: the workload's own initial weights"
        ),
        json_schema_extra=BITS,
    )
    checkpoint: Annotated[str | int, BeforeValidator(_which)] = Field(
        LATEST,
        description="of a run: the newest checkpoint, its best one, or that after so many steps",
        json_schema_extra=BITS,
    )
    strict: bool = Field(
        True,
        description=(
            "refuse when weights are missing or left over; false: take those that fit by name, "
            "and say what is missing. Shapes must agree always"
        ),
        json_schema_extra=BITS,
    )

    @model_validator(mode="before")
    @classmethod
    def _spelled_out(cls, value: object) -> object:
        return spelled_out_path(value)


def spelled_out_path(value: object) -> object:
    """The mapping for the short form PATH; anything else as it is."""
    if isinstance(value, str):
        return {"path": value}
    if value is not None and not isinstance(value, Mapping | InitFrom):
        raise ValueError("give a path or a mapping {path: PATH, strict: true}")
    return value


def source_uri(init_from: InitFrom, storage: str) -> str | None:
    """Where the weights to start from lie: a URI or an absolute path; None: nowhere.

    What has no slash in it is the name of a run in `storage`; a relative path is taken from the
    working directory, a relative storage too.
    """
    path = init_from.path
    if path is None or "://" in path:
        return path
    if "/" not in path and path not in (".", ".."):
        path = below(storage, path)
    return path if "://" in path else str(Path(path).absolute())


def below(storage: str, name: str) -> str:
    """What `name` is called inside a folder given by path or URI; options of a URI stay last."""
    if "://" not in storage:
        return f"{storage.rstrip('/')}/{name}"
    folder, mark, options = storage.partition("?")
    return f"{folder.rstrip('/')}/{name}{mark}{options}"
