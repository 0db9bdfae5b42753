"""YAML as people expect it in a job file: the scalars of YAML 1.2's core schema.

PyYAML follows YAML 1.1, in which `1e-3` is a string, `1:4` is the number 64, `010` is 8, `on` is
true, and a key given twice silently takes its last value. Here they are 0.001, "1:4", 10, "on"
and an error. What `dump` writes, `load` reads back to the same value.
"""

from __future__ import annotations

import re
from collections.abc import Hashable
from typing import Any

import yaml

# tag, pattern, characters it may start with
_SCALARS = (
    ("null", r"(?:~|null|Null|NULL|)", ["~", "n", "N", ""]),
    ("bool", r"(?:true|True|TRUE|false|False|FALSE)", list("tTfF")),
    ("int", r"(?:[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+)", list("-+0123456789")),
    (
        "float",
        r"(?:[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?"
        r"|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))",
        list("-+.0123456789"),
    ),
    ("merge", r"(?:<<)", ["<"]),
)


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value:
            if isinstance(key_node, yaml.ScalarNode):
                if (key_node.tag, key_node.value) in seen:
                    raise yaml.constructor.ConstructorError(
                        None, None, f"{key_node.value!r} is given twice", key_node.start_mark
                    )
                seen.add((key_node.tag, key_node.value))
        return super().construct_mapping(node, deep=deep)


class _Dumper(yaml.SafeDumper):
    """Quotes what either version would not read as text, so that any reader agrees."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _int(loader: _Loader, node: yaml.ScalarNode) -> int:
    text = str(loader.construct_scalar(node))
    return int(text, 0) if text[:2] in ("0o", "0x") else int(text)


for _kind, _pattern, _first in _SCALARS:
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(
            f"tag:yaml.org,2002:{_kind}", re.compile(f"^{_pattern}$"), _first
        )
_Loader.add_constructor("tag:yaml.org,2002:int", _int)


def load(text: str) -> Any:
    """The plain data that the text holds.

    Raises:
        yaml.YAMLError: it is no YAML, gives a key twice, or has tags other than those of plain
            data.
    """
    return yaml.load(text, Loader=_Loader)


def dump(data: object) -> str:
    """The text for plain data (mappings in their order), without anchors."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False)
