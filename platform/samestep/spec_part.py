"""What every part of the job spec has in common."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, JsonValue, model_validator

BITS: dict[str, JsonValue] = {"affects_bits": True}
FREE: dict[str, JsonValue] = {"affects_bits": False}


class Part(BaseModel):
    """Fields that belong together; strict, frozen, and without unknown names."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, strict=True, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _empty(cls, data: object) -> object:
        """A part with nothing under it in the YAML file has its defaults."""
        return {} if data is None else data
