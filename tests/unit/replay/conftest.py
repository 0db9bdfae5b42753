from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

# Test modules share the module beside this one.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from planted_runs import HERE, JOB, STEP, Runs, fresh, sample_at


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Runs that end at STEP for one reason each, and some that don't."""
    folder = tmp_path_factory.mktemp("planted")
    (folder / "job.yaml").write_text(yaml.safe_dump(JOB))
    (folder / "wobbly.py").write_text((HERE / "wobbly.py").read_text())
    bad = sample_at(STEP, 1)
    jobs: dict[str, dict[str, Any]] = {
        "poisoned": {"args.poisoned": bad},
        "large": {"args.large": bad},
        "raises": {"args.raises": bad},
        "explodes": {"args.lr": 1e12},
        "loud": {
            "args.loud": bad,
            "incidents.loss_spike": "stop",
            "incidents.least": 4,
            "incidents.window": 8,
        },
        "secret": {
            "args.large": bad,
            "args.token": "hush-hush",
            "incidents.bundle.secret_args": "[token]",
        },
        "skips": {"args.poisoned": bad, "incidents.non_finite": "skip"},
        "back": {
            "args.poisoned": bad,
            "incidents.non_finite": "rollback",
            "incidents.rollback_steps": 2,
        },
        "calm": {},
        "light": {"args.momentum": 0.5, "max_steps": 4},
        "tilts": {"args.tilts": bad},
        "many": {"args.many": True},
    }
    commands = []
    for name, settings in jobs.items():
        given = [word for path, value in settings.items() for word in ("--set", f"{path}={value}")]
        commands.append(["train", "job.yaml", "--name", name, *given])
    results = fresh(folder, *commands)
    ended = {name: result.status for name, result in zip(jobs, results, strict=True)}
    assert ended == {
        **dict.fromkeys(("poisoned", "large", "raises", "explodes", "loud", "secret"), 1),
        **dict.fromkeys(("skips", "back", "calm", "light", "tilts", "many"), 0),
    }, results
    return Runs(folder=folder)
