"""The part of the job spec about what a run may cost."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from samestep.spec_part import FREE, Part


class Budget(Part):
    """What a run may use, over all of its attempts.

    When it is used up the run stops with a checkpoint and the status `budget_exhausted`; a higher
    budget resumes it. Time counts while workers are held, restarts and waits included.
    """

    wall_hours: float | None = Field(
        None, gt=0, description="hours of wall-clock time; null: no limit", json_schema_extra=FREE
    )
    worker_hours: float | None = Field(
        None,
        gt=0,
        description="hours times the number of workers; null: no limit",
        json_schema_extra=FREE,
    )
    cost: float | None = Field(
        None,
        gt=0,
        description="cost in any currency, by cost_per_worker_hour; null: no limit",
        json_schema_extra=FREE,
    )
    cost_per_worker_hour: float | None = Field(
        None, gt=0, description="what a worker costs in an hour", json_schema_extra=FREE
    )

    @model_validator(mode="after")
    def _priced(self) -> Self:
        if self.cost is not None and self.cost_per_worker_hour is None:
            raise ValueError(
                f"cost is {self.cost}, but cost_per_worker_hour is not given: it tells what time "
                "costs"
            )
        return self
