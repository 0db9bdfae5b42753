"""What several workers keep of an incident is taken again by one process, bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attempts import Run
from pool import spec_of

from samestep.incidents.bundle_folder import folder_of, has_bundle
from samestep.incidents.record import list_incidents

Results = Callable[..., list[Any]]
HERE = Path(__file__).resolve().parent
FRESH = HERE.parent / "replay" / "fresh.py"
WHERE = ["before_step", "backward", "optimizer", "on_step", "evaluate"]


def spec(tmp_path: Path, where: str) -> dict[str, Any]:
    return spec_of(
        "breaking:Breaking",
        args={"where": where, "at": 5, "marker": str(tmp_path / where), "rank": None},
        max_steps=12,
        batch_size=12,
        evaluate={"every_steps": 3},
        checkpoint={"every_steps": 2},
        digest_every=2,
    )


def test_an_exception_anywhere_in_a_step_is_raised_again_from_its_bundle(
    results: Results, tmp_path: Path
) -> None:
    commands, steps = [], []
    for where in WHERE:
        run = tmp_path / f"run-{where}"
        answers = results(
            "broken_attempts", 3, spec=spec(tmp_path, where), run=str(run), lost=[None]
        )
        storage = Run(run, answers).storage
        found = list_incidents(storage)
        having = [each for each in found if has_bundle(folder_of(storage, each.id))]
        incident = (having or found)[0]
        steps.append(incident.step)
        options = ["--code", str(HERE), "--set", f"args.marker={tmp_path}/again-{where}", "--json"]
        commands.append({"args": ["replay", str(run), incident.id, *options]})
    (tmp_path / "commands").write_text(json.dumps(commands))
    done = subprocess.run(
        [sys.executable, "-P", str(FRESH), "commands", "results"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answers = json.loads((tmp_path / "results").read_text())
    for where, step, answer in zip(WHERE, steps, answers, strict=True):
        assert answer["status"] == 0, where
        found = json.loads(answer["out"])
        assert found["step"] == step
        assert " in strike" in found["raised"]
