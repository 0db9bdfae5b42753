"""Reading a run's ledger while it is written: each line once, as soon as it is whole."""

from __future__ import annotations

import json
from typing import Any

from samestep.checkpoint.storage import Storage
from samestep.telemetry.ledger import HEADER, segments


class LedgerTail:
    """Gives the lines that came since the last look; local storage only.

    Args:
        run: the run directory; it may not be there yet.
    """

    def __init__(self, run: Storage) -> None:
        assert run.local_path is not None, "only a local ledger can be read while it grows"
        self._run = run
        self._folder = run.local_path
        self._offsets: dict[str, int] = {}

    def new_lines(self) -> list[dict[str, Any]]:
        """Whole lines that were not there before, in the order of writing; headers left out."""
        found: list[dict[str, Any]] = []
        for name in segments(self._run):
            with (self._folder / name).open("rb") as file:
                file.seek(self._offsets.get(name, 0))
                content = file.read()
            whole = content[: content.rfind(b"\n") + 1]
            self._offsets[name] = self._offsets.get(name, 0) + len(whole)
            lines = [json.loads(line) for line in whole.splitlines()]
            found += [line for line in lines if line["type"] != HEADER]
        return found
