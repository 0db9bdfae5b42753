from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

# Test modules share the modules beside this one, and what changes bundles.
sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.append(str(Path(__file__).resolve().parents[1] / "incidents"))

from planted_runs import BAD, ENDED, HERE, JOB, PAGE, TOKEN, Result, Runs, fresh

from samestep.incidents.bundle import folder_of


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Runs that end at STEP for one reason each, and some that don't."""
    folder = tmp_path_factory.mktemp("planted")
    (folder / "job.yaml").write_text(yaml.safe_dump(JOB))
    (folder / "wobbly.py").write_text((HERE / "wobbly.py").read_text())
    jobs: dict[str, dict[str, Any]] = {
        "poisoned": {"args.poisoned": BAD},
        "large": {"args.large": BAD},
        "raises": {"args.raises": BAD},
        "explodes": {"args.lr": 1e12},
        "loud": {
            "args.loud": BAD,
            "incidents.loss_spike": "stop",
            "incidents.least": 4,
            "incidents.window": 8,
        },
        "secret": {
            "args.large": BAD,
            "args.token": "hush-hush",
            "incidents.bundle.secret_args": "[token]",
        },
        "tells": {
            "args.raises": BAD,
            "args.token": TOKEN,
            "incidents.bundle.secret_args": "[token]",
        },
        "skips": {"args.poisoned": BAD, "incidents.non_finite": "skip"},
        "back": {
            "args.poisoned": BAD,
            "incidents.non_finite": "rollback",
            "incidents.rollback_steps": 2,
        },
        "calm": {},
        "light": {"args.momentum": 0.5, "max_steps": 4},
        "plain": {"args.momentum": 0.0, "max_steps": 5},
        "tilts": {"args.tilts": BAD},
        "many": {"args.many": True},
    }
    commands = []
    for name, settings in jobs.items():
        given = [word for path, value in settings.items() for word in ("--set", f"{path}={value}")]
        commands.append(["train", "job.yaml", "--name", name, *given])
    results = fresh(folder, *commands)
    ended = {name: result.status for name, result in zip(jobs, results, strict=True)}
    assert ended == {
        **dict.fromkeys(("poisoned", "large", "raises", "explodes", "loud", "secret", "tells"), 1),
        **dict.fromkeys(("skips", "back", "calm", "light", "plain", "tilts", "many"), 0),
    }, results
    return Runs(folder=folder)


@pytest.fixture(scope="session")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("elsewhere")


@pytest.fixture(scope="session")
def replayed(runs: Runs, elsewhere: Path) -> dict[str, Result]:
    """What `samestep replay` says of each, all by one fresh process elsewhere."""
    folder = elsewhere
    changed = folder / "changed"
    changed.mkdir()
    text = (HERE / "wobbly.py").read_text(encoding="utf-8")
    (changed / "wobbly.py").write_text(
        text.replace("value = error.mean()", "value = error.median()")
    )
    code = ["--code", str(runs.folder)]
    ids = {name: runs.incident(name).id for name in ENDED}

    def of(name: str, *options: str) -> list[str]:
        return ["replay", str(runs.folder / "runs" / name), *options]

    nowhere = folder / "nowhere"
    nowhere.mkdir()
    (nowhere / "wobbly.py").write_text(
        text.replace("return Points(", "raise FileNotFoundError(2, 'no data', '/gone')\n        ("),
        encoding="utf-8",
    )
    secret = str(folder_of(runs.at("secret"), runs.incident("secret").id).local_path)
    tells = [runs.incident("tells").id]
    commands = {
        "missing": of("calm", "--at", "5"),
        **{name: of(name, ids[name], "--json", "--deep", *code) for name in ids},
        "skips": of("skips", runs.incident("skips").id, "--json", "--steps", "2", *code),
        "pack": ["pack", of("large")[1], ids["large"], "--out", "one.zip"],
        "packed": ["replay", "one.zip", "--deep", "--json", "--code", str(nowhere)],
        "behind a bundle": ["replay", "one.zip", "--steps", "1", "--code", str(nowhere)],
        "no data": of("large", ids["large"], "--from", "4", "--code", str(nowhere)),
        "from a checkpoint": of("poisoned", ids["poisoned"], "--from", "4", "--json", *code),
        "secret lacking": ["replay", secret, *code],
        "secret given": ["replay", secret, "--set", "args.token=other", *code],
        "secret in the run": of("secret", runs.incident("secret").id, *code),
        "no such option": of("calm", "--at", "7", "--what-if", "optimizer.rate=1", *code),
        "a bundle is one step": ["replay", "one.zip", "--at", "7", *code],
        "back": of("back", runs.incident("back").id, "--json", *code),
        "back from": of("back", runs.incident("back").id, "--from", "4", "--json", *code),
        "back all": of("back", "--at", "0", "--steps", "8", "--json", *code),
        "any": of("calm", "--at", "7", "--json", *code),
        "from": of("calm", "--at", "7", "--from", "4", "--json", *code),
        "all": of("calm", "--at", "0", "--steps", "8", "--json", *code),
        "told": of("poisoned", ids["poisoned"], *code),
        "threads": of("many", "--at", "1", "--threads", "2", *code),
        "on cpu": of("calm", "--at", "7", "--device", "cpu", "--json", *code),
        "no such device": of("calm", "--at", "7", "--device", "gpu", *code),
        "no gpu": of("calm", "--at", "7", "--device", "cuda:0", *code),
        "changed": of("calm", "--at", "5", "--code", str(changed)),
        "changed raises": of(
            "calm", "--at", "5", "--set", f"args.raises={BAD}", "--steps", "3", *code
        ),
        "what if": of("explodes", ids["explodes"], "--what-if", "args.lr=0.05", "--json", *code),
        "what if optimizer": of("calm", "--at", "7", "--what-if", "optimizer.lr=1.0", *code),
        "what if twice": of("plain", "--at", "4", "--what-if", "args.lr=0.1", "--json", *code),
        "what if clipped": of("plain", "--at", "4", "--what-if", "clip_norm=1", "--json", *code),
        "cut": of("calm", "--at", "7", "--what-if", "shards=4", *code),
        "behind": of("calm", "--at", "2", "--from", "4", *code),
        "beyond": of("calm", "--at", "9", *code),
        "both": of("calm", *code),
        "bisect": ["bisect", *(of(name)[1] for name in ("calm", "tilts")), *code],
        "from before": of("loud", ids["loud"], "--from", "4", "--deep", "--json", *code),
        "bisect update": [
            "bisect",
            *(str(runs.folder / "runs" / n) for n in ("calm", "light")),
            *code,
        ],
        "report": of("poisoned", ids["poisoned"], "--report", str(runs.folder / PAGE), *code),
        "tells": of("tells", *tells, "--report", "bundle.html", *code),
        "tells from": of("tells", *tells, "--from", "4", "--report", "run.html", *code),
        "bisect same": ["bisect", *[str(runs.folder / "runs" / "calm")] * 2, *code],
    }
    results = fresh(folder, *commands.values())
    return dict(zip(commands, results, strict=True))
