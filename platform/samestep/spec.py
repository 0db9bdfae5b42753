"""The job spec: the one place where every setting, its default, unit and limits are written.

A field marked ``affects_bits`` is part of what the ledger's numbers depend on: it can't change
over the life of a run. The others (workers, mode, storage, retention) may change at any resume.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, Self, get_args

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    Field,
    JsonValue,
    ValidationError,
    model_validator,
)

from samestep import yaml12
from samestep.errors import SpecError
from samestep.spec_budget import Budget
from samestep.spec_faults import Faults
from samestep.spec_incidents import Incidents
from samestep.spec_part import BITS, FREE, Part
from samestep.spec_telemetry import Metrics, Tracking
from samestep.spec_training import (
    Checkpoint,
    EarlyStop,
    Ema,
    Evaluate,
    InitFrom,
    spelled_out_path,
)

RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


class Mode(StrEnum):
    """Where the shards are computed; never what is computed."""

    AUTO = "auto"
    DDP = "ddp"
    DATAPARALLEL = "dataparallel"
    LOCAL = "local"


class Workers(Part):
    """How many workers the group may have; `workers: 3` is short for `{min: 3, max: 3}`."""

    min: int = Field(1, ge=1, description="fewest workers to train with", json_schema_extra=FREE)
    max: int = Field(1, ge=1, description="most workers to train with", json_schema_extra=FREE)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.max < self.min:
            raise ValueError(f"max ({self.max}) is less than min ({self.min})")
        return self


def _spelled_out(value: object) -> object:
    """The mapping for the short forms N, "N" and "MIN:MAX"; anything else as it is."""
    if isinstance(value, str) and re.fullmatch(r"\d+(:\d+)?", value):
        low, _, high = value.partition(":")
        return {"min": int(low), "max": int(high or low)}
    if isinstance(value, int) and not isinstance(value, bool):
        return {"min": value, "max": value}
    return value


def _workers(value: object) -> object:
    value = _spelled_out(value)
    if value is not None and not isinstance(value, Mapping | Workers):
        raise ValueError("give a number N, a range MIN:MAX or a mapping {min: MIN, max: MAX}")
    return value


class Resources(Part):
    """What one worker takes from the Ray cluster."""

    cpu: float = Field(1, gt=0, description="CPUs per worker", json_schema_extra=FREE)
    gpu: int = Field(
        0,
        ge=0,
        le=1,
        description="GPUs per worker; the device kind is part of the numerics",
        json_schema_extra=BITS,
    )


class Numerics(Part):
    """What else decides which bits come out."""

    tf32: bool = Field(
        False, description="allow TF32 in matrix products on GPU", json_schema_extra=BITS
    )
    mixed: Literal["refuse", "allow"] = Field(
        "refuse",
        description=(
            "workers whose fingerprint or canary differ: refuse the group, or train and say in "
            "the ledger that the bits depend on placement"
        ),
        json_schema_extra=FREE,
    )
    cpu_capability: Literal["default", "avx2", "avx512"] | None = Field(
        None,
        description="pin the vector instructions that torch and oneDNN use; null: what is there",
        json_schema_extra=BITS,
    )


class GradScaler(Part):
    """Loss scaling for `precision: fp16` (arguments of torch.amp.GradScaler)."""

    init_scale: float = Field(
        65536.0, gt=0, le=3e38, description="first scale", json_schema_extra=BITS
    )
    growth_factor: float = Field(
        2.0, gt=1, description="factor when the scale grows", json_schema_extra=BITS
    )
    backoff_factor: float = Field(
        0.5, gt=0, lt=1, description="factor after an overflow", json_schema_extra=BITS
    )
    growth_interval: int = Field(
        2000, ge=1, description="good steps before the scale grows", json_schema_extra=BITS
    )


class JobSpec(Part):
    """A job: a workload and how to run it."""

    workload: Annotated[str, Field(pattern=r"^[A-Za-z_][\w.]*:[A-Za-z_]\w*$")] = Field(
        description="module:Class, found from the job file's folder or the working directory",
        json_schema_extra=BITS,
    )
    args: dict[str, JsonValue] = Field(
        default_factory=dict,
        description="keyword arguments of the workload's class",
        json_schema_extra=BITS,
    )
    name: str | None = Field(
        None,
        pattern=f"^{RUN_NAME.pattern}$",
        description="name of the run; null: that of the job file's folder if it can be one, else "
        "of the workload's module",
        json_schema_extra=FREE,
    )
    seed: int = Field(
        0, ge=0, lt=2**63, description="seed of every random stream", json_schema_extra=BITS
    )
    batch_size: int = Field(
        ge=1, description="samples of one step, over all workers", json_schema_extra=BITS
    )
    shards: int = Field(
        4,
        ge=1,
        le=4096,
        description=(
            "equal parts a batch is cut into; caps the number of workers. More shards than "
            "workers is gradient accumulation: a worker computes its shards one after another"
        ),
        json_schema_extra=BITS,
    )
    epochs: int | None = Field(
        None, ge=1, description="passes over the data (or give max_steps)", json_schema_extra=FREE
    )
    max_steps: int | None = Field(
        None, ge=1, description="steps to take (or give epochs)", json_schema_extra=FREE
    )
    drop_last: bool = Field(
        False, description="leave out the short last batch of an epoch", json_schema_extra=BITS
    )
    workers: Annotated[Workers, BeforeValidator(_workers)] = Field(
        default_factory=Workers,
        description="number of workers in mode ddp",
        json_schema_extra=FREE,
    )
    resources: Resources = Field(default_factory=Resources, json_schema_extra=FREE)
    mode: Mode = Field(
        Mode.AUTO,
        strict=False,  # a mode may be given by its name
        description="where the shards are computed",
        json_schema_extra=FREE,
    )
    reduction: Literal["exact", "fast"] = Field(
        "exact",
        description="exact: the fixed tree; fast: stock DDP all-reduce, no promise about bits",
        json_schema_extra=BITS,
    )
    precision: Literal["fp32", "bf16", "fp16"] = Field(
        "fp32", description="autocast dtype of the forward pass", json_schema_extra=BITS
    )
    reduce_dtype: Literal["float32"] | None = Field(
        None,
        description="dtype of the gradient sums; null: each parameter's own",
        json_schema_extra=BITS,
    )
    scaler: GradScaler = Field(default_factory=GradScaler, json_schema_extra=BITS)
    threads: int = Field(
        1, ge=1, le=512, description="intra-op threads per worker", json_schema_extra=BITS
    )
    loader_processes: int = Field(
        0, ge=0, le=256, description="data loader processes per worker", json_schema_extra=FREE
    )
    clip_norm: float | None = Field(
        None, gt=0, description="largest global gradient norm; null: no clipping",
        json_schema_extra=BITS,
    )  # fmt: skip
    nominal_weight: float | None = Field(
        None,
        gt=0,
        description=(
            "weight of a full shard where the workload returns weights of its own; null: the "
            "weight of shard 0 of step 0, kept with the run"
        ),
        json_schema_extra=BITS,
    )
    storage: str = Field(
        "./runs",
        min_length=1,
        pattern=r"\S",
        description="folder or URI (s3://, gs://) that holds the run directories",
        json_schema_extra=FREE,
    )
    evaluate: Evaluate = Field(default_factory=Evaluate, json_schema_extra=FREE)
    checkpoint: Checkpoint = Field(default_factory=Checkpoint, json_schema_extra=FREE)
    ema: Ema = Field(default_factory=Ema, json_schema_extra=BITS)
    early_stop: EarlyStop = Field(default_factory=EarlyStop, json_schema_extra=BITS)
    init_from: InitFrom = Field(default_factory=InitFrom, json_schema_extra=BITS)
    digest_every: int = Field(
        50,
        ge=0,
        description="compare the workers' states every so many steps; 0: only at checkpoints",
        json_schema_extra=FREE,
    )
    faults: Faults = Field(default_factory=Faults, json_schema_extra=FREE)
    budget: Budget = Field(default_factory=Budget, json_schema_extra=FREE)
    incidents: Incidents = Field(default_factory=Incidents, json_schema_extra=BITS)
    numerics: Numerics = Field(default_factory=Numerics, json_schema_extra=BITS)
    tracking: Tracking = Field(default_factory=Tracking, json_schema_extra=FREE)
    metrics: Metrics = Field(default_factory=Metrics, json_schema_extra=FREE)

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if (self.epochs is None) == (self.max_steps is None):
            given = "neither" if self.epochs is None else "both"
            raise ValueError(
                f"give exactly one of epochs and max_steps; got {given} "
                f"(epochs {self.epochs}, max_steps {self.max_steps})"
            )
        if self.workers.max > self.shards:
            raise ValueError(
                f"workers.max ({self.workers.max}) is more than shards ({self.shards}): a worker "
                "needs a shard of its own; lower workers.max or raise shards (raising it changes "
                "the bits)"
            )
        if self.reduction == "fast" and self.mode not in (Mode.AUTO, Mode.DDP):
            raise ValueError(f"reduction fast exists in mode ddp only, not in {self.mode}")
        if self.early_stop.metric and not (self.evaluate.every_epochs or self.evaluate.every_steps):
            raise ValueError(
                f"early_stop.metric is {self.early_stop.metric!r}, but evaluate.every_epochs and "
                "evaluate.every_steps are 0: no evaluation would ever decide; set one of them"
            )
        if self.incidents.least > self.incidents.window:
            raise ValueError(
                f"incidents.least ({self.incidents.least}) is more than incidents.window "
                f"({self.incidents.window}): no value could ever stand out"
            )
        if self.reduction == "fast" and self.incidents.audit_every:
            raise ValueError(
                f"incidents.audit_every is {self.incidents.audit_every}, but reduction fast "
                "promises nothing about bits, so there is nothing to compare: set it to 0"
            )
        return self


def bits_fields(model: type[BaseModel] = JobSpec, prefix: str = "") -> Iterator[tuple[str, bool]]:
    """Yields every leaf field of the spec as (dotted path, affects_bits)."""
    for name, field in model.model_fields.items():
        part = _part_of(field.annotation)
        if part is not None:
            yield from bits_fields(part, f"{prefix}{name}.")
        else:
            extra = field.json_schema_extra
            assert isinstance(extra, dict), f"{prefix}{name} does not say whether it affects bits"
            yield f"{prefix}{name}", bool(extra["affects_bits"])


def _part_of(annotation: object) -> type[BaseModel] | None:
    for candidate in (annotation, *get_args(annotation)):
        if isinstance(candidate, type) and issubclass(candidate, BaseModel):
            return candidate
    return None


def field_at(spec: JobSpec, path: str) -> Any:
    """Value of the field at a dotted path."""
    value: Any = spec
    for part in path.split("."):
        value = getattr(value, part)
    return value


def bits_part(spec: JobSpec) -> dict[str, JsonValue]:
    """The fields that affect bits, by dotted path, as plain JSON."""
    data = spec.model_dump(mode="json")
    part: dict[str, JsonValue] = {}
    for path, affects in bits_fields():
        if affects:
            value: Any = data
            for key in path.split("."):
                value = value[key]
            part[path] = value
    return part


def differing_fields(a: JobSpec, b: JobSpec, *, only_bits: bool = True) -> list[str]:
    """Lines `path: value in a against value in b` for the fields in which two specs differ."""
    return [
        f"{path}: {field_at(a, path)!r} against {field_at(b, path)!r}"
        for path, affects in bits_fields()
        if (affects or not only_bits) and _text(field_at(a, path)) != _text(field_at(b, path))
    ]


def _text(value: object) -> str:
    """Tells 1 from 1.0 and true, and 0.0 from -0.0, as a workload may."""
    return json.dumps(value, sort_keys=True)


def parse_spec(data: object, *, source: str = "the spec") -> JobSpec:
    """Validates plain data (as YAML gives it).

    Raises:
        SpecError: one line per problem, with the field's path, the value and what is allowed.
    """
    if not isinstance(data, Mapping):
        raise SpecError(f"{source} must be a mapping of fields, got {type(data).__name__}")
    try:
        return JobSpec.model_validate(dict(data))
    except ValidationError as error:
        lines = [_explain(item, data) for item in error.errors(include_url=False)]
        raise SpecError(f"{source} is not valid:\n  " + "\n  ".join(lines)) from None


def load_spec(path: Path | str, overrides: Mapping[str, object] | None = None) -> JobSpec:
    """Reads a job file; `overrides` maps dotted paths to values that take precedence.

    A job without a name gets that of its folder, so that it is one run however it is started.

    Raises:
        SpecError: the file is missing, is no YAML, or does not validate.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise SpecError(
            f"can't read the job file {path} ({error.strerror}); looked in {path.resolve().parent}"
        ) from error
    except UnicodeDecodeError as error:
        raise SpecError(f"{path} is not UTF-8 text: {error}") from error
    try:
        data = yaml12.load(text)
    except yaml.YAMLError as error:
        raise SpecError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(data, dict):
        raise SpecError(f"{path} must hold a mapping of fields, got {type(data).__name__}")
    if "workers" in data:  # so that an override of workers.max finds a mapping
        data["workers"] = _spelled_out(data["workers"])
    if isinstance(data.get("init_from"), str):
        data["init_from"] = spelled_out_path(data["init_from"])
    for dotted, value in (overrides or {}).items():
        _set(data, dotted, value)
    spec = parse_spec(data, source=str(path))
    folder = path.resolve().parent.name
    if spec.name is None and RUN_NAME.fullmatch(folder):
        spec = spec.model_copy(update={"name": folder})
    return spec


def parse_override(text: str) -> tuple[str, object]:
    """Splits `a.b=value`; the value is read as YAML."""
    path, equals, value = text.partition("=")
    if not equals or not path.strip():
        raise SpecError(f"--set takes a.b=value, got {text!r}")
    try:
        return path.strip(), yaml12.load(value)
    except yaml.YAMLError as error:
        raise SpecError(f"--set {path}: {value!r} is not valid YAML: {error}") from error


def changed_spec(spec: JobSpec, overrides: Mapping[str, object]) -> JobSpec:
    """The spec with other values at some dotted paths.

    Raises:
        SpecError: it would not be valid.
    """
    data = spec.model_dump(mode="json")
    for dotted, value in overrides.items():
        _set(data, dotted, value)
    return parse_spec(data)


def dump_spec(spec: JobSpec) -> str:
    """The spec as YAML that `load_spec` reads back to an equal one."""
    return yaml12.dump(spec.model_dump(mode="json"))


def _set(data: dict[str, Any], dotted: str, value: object) -> None:
    *parents, leaf = dotted.split(".")
    if not all(part.strip() for part in (*parents, leaf)):
        raise SpecError(
            f"--set {dotted}: a name is empty between the dots; give the path of a field, such as "
            "checkpoint.keep"
        )
    for part in parents:
        inner = data[part] = {} if data.get(part) is None else data[part]
        if not isinstance(inner, dict):
            raise SpecError(f"--set {dotted}: {part} is {inner!r}, not a mapping")
        data = inner
    data[leaf] = value


def _explain(error: Any, data: Mapping[Any, Any]) -> str:
    path = ".".join(_path(error["loc"], data))
    value = error["input"]
    if error["type"] == "extra_forbidden":
        if re.search("accum", str(error["loc"][-1]), re.IGNORECASE):
            return (
                f"{path}: unknown field; gradients are accumulated wherever there are more shards "
                "than workers: set shards (shards: 8 on 2 workers accumulates over 4)"
            )
        names = _names_at(error["loc"][:-1])
        near = difflib.get_close_matches(str(error["loc"][-1]), names, n=1, cutoff=0.5)
        hint = f"did you mean {near[0]}?" if near else f"allowed: {', '.join(names)}"
        return f"{path}: unknown field; {hint}"
    if error["type"] == "missing":
        return f"{path}: required, but not given"
    message: str = error["msg"].removeprefix("Value error, ")
    if not path:
        return message
    return f"{path}: {message}, got {value!r}"


def _path(location: tuple[Any, ...], data: Any) -> Iterator[str]:
    """The parts of a path, without the kinds of value that pydantic adds to those in `args`."""
    for part in location:
        is_index = isinstance(data, list) and isinstance(part, int) and part < len(data)
        if is_index or (isinstance(data, Mapping) and part in data):
            data = data[part]
        elif location[0] == "args":
            continue
        yield str(part)


def _names_at(location: tuple[Any, ...]) -> list[str]:
    model: type[BaseModel] = JobSpec
    for part in location:
        field = model.model_fields.get(str(part))
        inner = _part_of(field.annotation) if field else None
        if inner is None:
            break
        model = inner
    return list(model.model_fields)
