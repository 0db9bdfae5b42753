"""How the code and the packages here differ from those of the run: for people, never compared."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from samestep.telemetry.provenance import packages, source_of

MAX_LINES: Final = 12


def surroundings(provenance: Mapping[str, Any], folder: Path) -> list[str]:
    """Lines `what: in the run against here`; none where nothing differs, or nothing is known.

    Args:
        provenance: of a source; may be wrong, and is only told.
        folder: of the workload's module here.
    """
    lines = [*_code(provenance, folder), *_python(provenance)]
    then, now = provenance.get("packages"), packages()
    if isinstance(then, Mapping):
        lines += [
            f"{name}: {then.get(name, 'none')} against {now.get(name, 'none')}"
            for name in sorted({*then, *now}, key=str.lower)
            if then.get(name) != now.get(name)
        ]
    more = len(lines) - MAX_LINES
    return [*lines[:MAX_LINES], *([f"and {more} packages more"] if more > 0 else [])]


def _code(provenance: Mapping[str, Any], folder: Path) -> list[str]:
    then, now = provenance.get("git_commit"), source_of(folder)
    if not then:
        return []
    told = [
        f"{commit or 'no git revision'}{' with changes' if changed == 'true' else ''}"
        for commit, changed in (
            (then, provenance.get("git_changed")),
            (now.get("git_commit"), now.get("git_changed")),
        )
    ]
    return [] if told[0] == told[1] else [f"code: {told[0]} against {told[1]}"]


def _python(provenance: Mapping[str, Any]) -> list[str]:
    then, now = provenance.get("python"), platform.python_version()
    return [f"Python: {then} against {now}"] if then and then != now else []
