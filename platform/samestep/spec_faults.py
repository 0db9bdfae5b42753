"""The part of the job spec about faults: how often to try again, and how long to wait."""

from __future__ import annotations

from pydantic import Field

from samestep.spec_part import FREE, Part


class Retries(Part):
    """How often a worker group is restarted in a row, without a step in between, by cause."""

    user: int = Field(
        1,
        ge=0,
        description=(
            "restarts after the workload's own exceptions, lack of memory among them; the same "
            "failure of the same step ends the run whatever this says"
        ),
        json_schema_extra=FREE,
    )
    infrastructure: int = Field(
        20,
        ge=0,
        description=(
            "restarts after lost workers or nodes, and after workers that their node ended for "
            "lack of memory"
        ),
        json_schema_extra=FREE,
    )


class Faults(Part):
    """What is done about faults."""

    retries: Retries = Field(default_factory=Retries, json_schema_extra=FREE)
    hang_timeout_s: float = Field(
        300,
        gt=0,
        description=(
            "seconds without progress after which a worker counts as hanging: its stacks go into "
            "an incident and its process ends, the others go on; set it above the longest batch, "
            "update or evaluation batch. Whoever waits for another gives up 5 s later"
        ),
        json_schema_extra=FREE,
    )
    placement_timeout_s: float = Field(
        30,
        gt=0,
        description="seconds to wait for room for the fewest workers, before anything starts",
        json_schema_extra=FREE,
    )
    replacement_timeout_s: float = Field(
        600,
        gt=0,
        description=(
            "seconds to wait for room for the fewest workers after some were lost; where there is "
            "room and their processes only start, at least 300"
        ),
        json_schema_extra=FREE,
    )
    spares: int = Field(
        1,
        ge=0,
        le=8,
        description=(
            "processes per node that stand ready to take over from a dead worker, each about "
            "420 MB of memory; 0: a worker that died is replaced seconds later"
        ),
        json_schema_extra=FREE,
    )
