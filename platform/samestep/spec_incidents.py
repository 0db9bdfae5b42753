"""The part of the job spec about what is odd in a step, and what is done about it."""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field, field_validator

from samestep.spec_part import BITS, FREE, Part

Policy = Literal["stop", "skip", "rollback", "continue"]
"""What becomes of a run at an incident; docs/incidents.md defines each."""

AuditPolicy = Literal["retry", "avoid", "stop"]
"""What becomes of a run when an audit fails; docs/audit.md defines each."""

StepRange = Annotated[tuple[int, int], Field(strict=False)]
"""First step, and one past the last; YAML has lists only."""

STOP: Final[Policy] = "stop"
SKIP: Final[Policy] = "skip"
ROLLBACK: Final[Policy] = "rollback"
CONTINUE: Final[Policy] = "continue"
RETRY: Final[AuditPolicy] = "retry"
AVOID: Final[AuditPolicy] = "avoid"


class Bundles(Part):
    """What is kept of an incident so that it can be replayed without the data."""

    keep: int = Field(
        10,
        ge=0,
        description="bundles that a run writes at most; 0: none. Later incidents have none",
        json_schema_extra=FREE,
    )
    max_bytes: int = Field(
        2 * 2**30,
        ge=2**20,
        description=(
            "bytes of one bundle at most: samples are left out first, and the bundle says so; "
            "where the state alone is larger there is none"
        ),
        json_schema_extra=FREE,
    )
    code: bool = Field(
        False,
        description="put the workload's own source files (its module's folder) into each bundle",
        json_schema_extra=FREE,
    )
    environment: tuple[str, ...] = Field(
        (),
        strict=False,  # YAML has lists only
        description="environment variables whose values may be stored; of others only the names",
        json_schema_extra=FREE,
    )
    secret_args: tuple[str, ...] = Field(
        (),
        strict=False,
        description=(
            "names in args whose values are left out of bundles; a replay takes them from "
            "--set args.NAME=VALUE"
        ),
        json_schema_extra=FREE,
    )


class Incidents(Part):
    """What counts as odd in a step's reduced values, and what is done about it.

    Decided before the update, on values that are equal on every worker: so all decide the same
    without talking, and a restart decides the same again.
    """

    non_finite: Policy = Field(
        STOP,
        description="when loss or gradient norm is NaN or infinite, or a weight is",
        json_schema_extra=BITS,
    )
    loss_spike: Policy = Field(
        CONTINUE,
        description="when the loss stands out upwards from the steps before",
        json_schema_extra=BITS,
    )
    grad_spike: Policy = Field(
        CONTINUE,
        description="when the gradient norm stands out upwards from the steps before",
        json_schema_extra=BITS,
    )
    spike_score: float = Field(
        30.0,
        gt=0,
        description=(
            "robust z-score (distance from the median in units of 1.4826 median absolute "
            "deviations) from which on a value stands out"
        ),
        json_schema_extra=BITS,
    )
    window: int = Field(
        64, ge=4, le=4096, description="steps that a value is compared with", json_schema_extra=BITS
    )
    least: int = Field(
        32,
        ge=4,
        le=4096,
        description="steps that there must be before a value can stand out",
        json_schema_extra=BITS,
    )
    weights_every: int = Field(
        50,
        ge=0,
        description="look for NaN and infinite weights every so many steps; 0: never",
        json_schema_extra=BITS,
    )
    rollback_steps: int = Field(
        20,
        ge=0,
        description=(
            "a rollback goes back to so many steps before the incident, and leaves out the "
            "batches from there through the incident's"
        ),
        json_schema_extra=BITS,
    )
    leave_out: tuple[StepRange, ...] = Field(
        (),
        strict=False,
        description=(
            "ranges of steps, each as [first, one past the last], whose batches are left out from "
            "the start: `samestep fork --skip-steps` sets it"
        ),
        json_schema_extra=BITS,
    )
    max_skips: int = Field(
        20,
        ge=0,
        description="steps of a run that policy skip leaves out at most; the next one stops it",
        json_schema_extra=BITS,
    )
    max_rollbacks: int = Field(
        3,
        ge=0,
        description="rollbacks of a run at most; the next one stops it",
        json_schema_extra=BITS,
    )
    audit_every: int = Field(
        0,
        ge=0,
        description=(
            "every so many steps another worker computes one shard again, and the bits of its "
            "gradients are compared (a worker alone compares with itself); it costs that worker "
            "the shard's time. 0: never"
        ),
        json_schema_extra=FREE,
    )
    audit: AuditPolicy = Field(
        RETRY,
        description=(
            "when an audit finds that a machine computed wrongly: take the step again (retry), on "
            "other nodes as long as workers.min find room there (avoid), or end the run (stop). "
            "The update of the step is never applied"
        ),
        json_schema_extra=FREE,
    )
    straggler_ratio: float = Field(
        3.0,
        ge=0,
        description=(
            "a worker that takes so many times as long for a sample as the median one is told of; "
            "0: never. Training goes on"
        ),
        json_schema_extra=FREE,
    )
    straggler_after_s: float = Field(
        60.0,
        ge=0,
        description="seconds for which it must have been that slow",
        json_schema_extra=FREE,
    )
    bundle: Bundles = Field(default_factory=Bundles, json_schema_extra=FREE)

    @field_validator("leave_out")
    @classmethod
    def _ranges(cls, pairs: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
        for first, end in pairs:
            if not 0 <= first < end:
                raise ValueError(
                    f"[{first}, {end}] is no range of steps: give [first, one past the last], "
                    "the first 0 or more"
                )
        return pairs

    @property
    def back_steps(self) -> int | None:
        """How far back the run may go; None: it never does."""
        policies = (self.non_finite, self.loss_spike, self.grad_spike)
        return self.rollback_steps if ROLLBACK in policies else None
