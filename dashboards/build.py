"""Writes the dashboards in `grafana/`: `python dashboards/build.py`; a test compares them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from fleet import FLEET
from incidents import INCIDENT
from one_run import ONE_RUN

FOLDER: Final = Path(__file__).resolve().parent / "grafana"
DASHBOARDS: Final = {"fleet": FLEET, "run": ONE_RUN, "incidents": INCIDENT}


def render() -> dict[str, str]:
    """The files by name."""
    return {
        f"{name}.json": json.dumps(dashboard.to_json(), indent=2) + "\n"
        for name, dashboard in DASHBOARDS.items()
    }


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, text in render().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
