"""What must not leave a run's machines: args that the job calls secret, and passwords in URLs."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from samestep.errors import SpecError
from samestep.spec import JobSpec, parse_spec

LEFT_OUT: Final = "(left out: secret)"
"""Stands in a bundle's job for the value of a secret arg."""
LEAST_CHARACTERS: Final = 4
"""Shorter values are not looked for in texts: they would be found in every other word."""

_USER = re.compile(r"(?<=://)[^/\s\"'<>]*@")
_QUERY = re.compile(
    r"([?&][\w.-]*(?:passw|secret|token|credential|signature|api_?key|access_?key)[\w.-]*=)"
    r"[^&\s\"'<>#]+",
    flags=re.IGNORECASE,
)


class Redaction:
    """Takes secrets out of what is written for others to read.

    Args:
        spec: the job; `incidents.bundle.secret_args` names its secrets.
    """

    def __init__(self, spec: JobSpec) -> None:
        self._spec = spec
        self._names = [name for name in spec.incidents.bundle.secret_args if name in spec.args]
        found = {text for name in self._names for text in _texts(spec.args[name])}
        self._secrets = frozenset(found)
        # The longest first: one may be a part of another.
        forms = {form for text in found for form in _forms(text)}
        self._forms = sorted(forms, key=lambda text: (-len(text), text))

    def text(self, text: str) -> str:
        """The text without secrets, and without users and passwords in URLs."""
        for form in self._forms:
            text = text.replace(form, LEFT_OUT)
        return without_credentials(text)

    def plain(self, value: Any) -> Any:
        """Plain data with `text` applied to every string in it."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {self.text(str(key)): self.plain(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.plain(item) for item in value]
        if isinstance(value, int | float) and str(value) in self._secrets:
            return LEFT_OUT
        return value

    def spec(self) -> tuple[JobSpec, list[str]]:
        """The job as it may be kept, and the fields (`args.token`) that are others in it."""
        before = self._spec.model_dump(mode="json")
        after = {
            key: value if key == "workload" else self.plain(value) for key, value in before.items()
        }
        for name in self._names:
            after["args"][name] = LEFT_OUT
        # The names of secrets may be told, even where one looks like a secret's value.
        after["incidents"] = before["incidents"]
        source = "the job without its secrets"
        try:
            return parse_spec(after, source=source), _changed(before, after)
        except SpecError:  # one looks like a word of the job elsewhere, where it tells nothing
            after = {**before, "args": after["args"]}
            return parse_spec(after, source=source), _changed(before, after)

    def is_free_of_secrets(self, data: bytes) -> bool:
        """Whether a file holds none of them, plain or as JSON and Python write them."""
        return not any(form.encode() in data for form in self._forms)


def without_credentials(text: str) -> str:
    """The text without users and passwords in its URLs."""
    if "://" not in text:
        return text
    return _QUERY.sub(rf"\1{LEFT_OUT.replace(' ', '_')}", _USER.sub("", text))


def _forms(secret: str) -> set[str]:
    """Plain, and as JSON and Python write it, which exceptions often do."""
    as_json = (json.dumps(secret, ensure_ascii=is_ascii) for is_ascii in (True, False))
    return {secret, *(text[1:-1] for text in (*as_json, repr(secret)))}


def _texts(value: Any) -> Iterator[str]:
    """The strings and numbers in a value that are long enough to be looked for."""
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
    elif value is not None and not isinstance(value, bool):
        text = str(value)
        if len(text) >= LEAST_CHARACTERS:
            yield text


def _changed(before: Any, after: Any, path: str = "") -> list[str]:
    """Dotted paths, two levels deep, of what differs."""
    if isinstance(before, dict) and isinstance(after, dict) and path.count(".") < 1:
        found = []
        for key in before:
            inner = f"{path}.{key}" if path else key
            found += _changed(before[key], after.get(key), inner)
        return found
    return [path] if before != after else []
