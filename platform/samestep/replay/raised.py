"""What an exception tells, in a form that two processes on two machines can compare."""

from __future__ import annotations

import re
import traceback
from dataclasses import dataclass
from pathlib import PurePath

from samestep.errors import UserCodeError
from samestep.incidents.record import Incident

_FRAME = re.compile(r'^\s*File "(.+)", line (\d+), in (.+)$', flags=re.MULTILINE)
_RAISED = re.compile(r" raised (\w+)(?:: |:?$)", flags=re.MULTILINE)
_LAST = re.compile(r"([A-Za-z_][\w.]*)(?::|$)")


@dataclass(frozen=True, kw_only=True)
class Raised:
    """An exception as plain data.

    Attributes:
        kind: name of its class.
        file: where it was raised; empty where that is not known.
        line: in that file.
        function: that raised it.
        message: for people.
        traceback: whole.
    """

    kind: str
    file: str
    line: int
    function: str
    message: str
    traceback: str

    @classmethod
    def of(cls, error: BaseException) -> Raised:
        """Takes an exception down; of one that tells the workload's, the workload's."""
        text = "".join(traceback.format_exception(error))
        message = str(error) if isinstance(error, UserCodeError) else _short(error)
        return cls._parsed(message, text, type(error).__name__)

    @classmethod
    def in_incident(cls, incident: Incident) -> Raised | None:
        """The exception that an incident tells; None where it tells none."""
        if not incident.traceback:
            return None
        return cls._parsed(incident.message, incident.traceback, "")

    @classmethod
    def _parsed(cls, message: str, text: str, kind: str) -> Raised:
        # A UserCodeError's message holds the workload's own traceback; its own frames are ours.
        told = _RAISED.search(message)
        own = message if told is not None and _FRAME.search(message) else text
        frames = _FRAME.findall(own)
        file, line, function = frames[-1] if frames else ("", "0", "")
        if told is not None:
            kind = told[1]
        elif not kind:
            kind = _last_kind(text)
        return cls(
            kind=kind,
            file=file,
            line=int(line),
            function=function,
            message=message.splitlines()[0] if message else kind,
            traceback=text,
        )

    @property
    def place(self) -> str:
        """Where it was raised, for people."""
        return f"{self.file}:{self.line} in {self.function}" if self.file else "a place unknown"

    def same_as(self, other: Raised) -> bool:
        """The same class of exception from the same line; the file's folder may be another."""
        return (
            self.kind == other.kind
            and PurePath(self.file).name == PurePath(other.file).name
            and self.line == other.line
        )

    def __str__(self) -> str:
        return f"{self.kind} at {self.place}"


def _last_kind(text: str) -> str:
    """The class named on the first line behind the last frame that is not indented."""
    frames = list(_FRAME.finditer(text))
    for line in text[frames[-1].end() if frames else 0 :].splitlines():
        found = _LAST.match(line)
        if found is not None:
            return found[1].rpartition(".")[2]
    return ""


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
