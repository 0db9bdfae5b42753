"""The parts of the job spec about where a run can be watched; none decides bits."""

from __future__ import annotations

import re

from pydantic import Field, field_validator

from samestep.spec_part import FREE, Part


class Tracking(Part):
    """What goes to MLflow; training never waits for it."""

    enabled: bool = Field(True, description="deliver the run to MLflow", json_schema_extra=FREE)
    uri: str | None = Field(
        None,
        min_length=1,
        description=(
            "MLflow's tracking URI (http://, https://, sqlite:///, postgresql://); null: the "
            "variable MLFLOW_TRACKING_URI, else mlflow.db in a local storage"
        ),
        json_schema_extra=FREE,
    )
    experiment: str | None = Field(
        None,
        min_length=1,
        max_length=256,
        description=(
            "MLflow experiment, made where there is none; null: the variable "
            "MLFLOW_EXPERIMENT_NAME, else samestep"
        ),
        json_schema_extra=FREE,
    )
    required: bool = Field(
        False,
        description="refuse to start while MLflow can't be reached; false: warn and go on",
        json_schema_extra=FREE,
    )
    registered_model: str | None = Field(
        None,
        max_length=200,
        pattern=r"^[^/:\s][^/:]*$",
        description=(
            "registered model that the run's model becomes the next version of when the run is "
            "done: the best model where checkpoint.best.metric names one, else the final one; "
            "null: none"
        ),
        json_schema_extra=FREE,
    )
    alias: str = Field(
        "candidate",
        max_length=200,
        pattern=r"^[A-Za-z0-9_-]+$",
        description=(
            "alias that names the newest version which a run registered (models:/NAME@ALIAS); "
            "MLflow keeps `latest`, `v1`, `v2`, ... for itself"
        ),
        json_schema_extra=FREE,
    )

    @field_validator("alias")
    @classmethod
    def _is_free(cls, value: str) -> str:
        if value.lower() == "latest" or re.fullmatch(r"[vV]\d+", value):
            raise ValueError(
                f"{value!r} is kept by MLflow for versions: give another alias, such as candidate "
                "or champion"
            )
        return value


class Metrics(Part):
    """Where Prometheus finds the run's metrics."""

    enabled: bool = Field(
        True, description="serve metrics while the run lives", json_schema_extra=FREE
    )
    port: int = Field(
        0,
        ge=0,
        le=65535,
        description="TCP port of the metrics page; 0: a free one, told at the start",
        json_schema_extra=FREE,
    )
    host: str = Field(
        "127.0.0.1",
        min_length=1,
        description="address to listen on; 0.0.0.0: all, where Prometheus is on another machine",
        json_schema_extra=FREE,
    )
    pushgateway: str | None = Field(
        None,
        pattern=r"^https?://\S+$",
        description=(
            "URL of a Prometheus Pushgateway that gets the last values when the run ends; for runs "
            "shorter than Prometheus' scrape interval"
        ),
        json_schema_extra=FREE,
    )
