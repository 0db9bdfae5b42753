"""Writes docs/spec.md from the job spec: `python -m samestep.cli.specdoc > docs/spec.md`."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from samestep.spec import JobSpec

SIGNS = {
    "ge": ">=",
    "gt": ">",
    "le": "<=",
    "lt": "<",
    "min_length": "characters >=",
    "max_length": "characters <=",
    "pattern": "",
}
HEAD = """# Every field of a job

Made from the spec itself by `python -m samestep.cli.specdoc`; a test compares them.
`samestep check --schema` prints the same as a JSON schema. A job file is YAML 1.2;
`--set a.b=value` sets a field by its path.

A field that affects **bits** is part of what the numbers in the ledger depend on: it can't change
over the life of a run. The others may change at any resume.

Together: exactly one of `epochs` and `max_steps` is given; `workers.max` is at most `shards`;
`reduction: fast` exists in mode `ddp` only; `early_stop.metric` needs `evaluate.every_epochs` or
`evaluate.every_steps`. A metric that is named must be one that the workload's `evaluate` gives.
"""


def render() -> str:
    """The page: a table for the job's own fields and one for each of its parts."""
    sections = [HEAD, "\n".join(_table(JobSpec, ""))]
    sections += [
        f"## `{prefix}`\n\n{_paragraphs(model)}\n\n" + "\n".join(_table(model, f"{prefix}."))
        for prefix, model in _parts(JobSpec, "")
    ]
    return "\n".join(f"{section.rstrip()}\n" for section in sections)


def _table(model: type[BaseModel], prefix: str) -> Iterator[str]:
    yield "| field | type | default | limits | bits | |"
    yield "| --- | --- | --- | --- | --- | --- |"
    for name, field in model.model_fields.items():
        if _part_of(field) is not None:
            continue
        extra = field.json_schema_extra
        bits = "yes" if isinstance(extra, dict) and extra["affects_bits"] else "no"
        cells = [
            f"`{prefix}{name}`",
            _type(field.annotation),
            _default(field),
            _limits(field),
            bits,
            field.description or "",
        ]
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _parts(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, type[BaseModel]]]:
    for name, field in model.model_fields.items():
        part = _part_of(field)
        if part is not None:
            yield f"{prefix}{name}", part
            yield from _parts(part, f"{prefix}{name}.")


def _part_of(field: FieldInfo) -> type[BaseModel] | None:
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _paragraphs(model: type[BaseModel]) -> str:
    lines = [line.strip() for line in (model.__doc__ or "").strip().splitlines()]
    return "\n\n".join(" ".join(p.split("\n")) for p in "\n".join(lines).split("\n\n"))


def _type(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if hasattr(annotation, "__metadata__"):
        return _type(arguments[0])
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in arguments)
    if origin in (Union, types.UnionType):
        kinds = [_type(kind) for kind in arguments if kind is not types.NoneType]
        return " or ".join([*kinds, *(["null"] if len(kinds) < len(arguments) else [])])
    if origin is dict:
        return "mapping"
    if hasattr(annotation, "__members__"):
        return " or ".join(f"`{member.value}`" for member in annotation)
    names = {str: "text", int: "integer", float: "number", bool: "true or false"}
    return names.get(annotation, getattr(annotation, "__name__", str(annotation)))


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    default: Any = field.get_default(call_default_factory=True, validated_data={})
    return f"`{json.dumps(default)}`" if not isinstance(default, str) else f"`{default}`"


def _limits(field: FieldInfo) -> str:
    found = list(_told(field.metadata))
    for kind in (field.annotation, *get_args(field.annotation)):  # those of `X | None` lie inside
        found += _told(getattr(kind, "__metadata__", ()))
        for inner in getattr(kind, "__metadata__", ()):
            found += _told(getattr(inner, "metadata", ()))
    return ", ".join(dict.fromkeys(found))


def _told(metadata: Any) -> Iterator[str]:
    for limit in metadata:
        for name, sign in SIGNS.items():
            value = getattr(limit, name, None)
            if value is not None:
                yield f"{sign} {value}" if name != "pattern" else f"`{value}`"


if __name__ == "__main__":
    print(render(), end="")
