"""What several workers keep of an incident is taken again by one process, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from attempts import Run, Train, replayed
from pool import spec_of

from samestep.incidents.bundle import folder_of, has_bundle
from samestep.incidents.bundle_folder import read_bundle
from samestep.incidents.record import list_incidents

Results = Callable[..., list[Any]]
HERE = Path(__file__).resolve().parent
WHERE = ["before_step", "backward", "optimizer", "on_step", "evaluate", "on_epoch"]
BEHIND = WHERE[3:]
"""After the update of a step."""


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
        (incident,) = list_incidents(storage)  # all three workers met it
        folder = folder_of(storage, incident.id)
        assert has_bundle(folder), where
        if where in BEHIND:
            bundle = read_bundle(folder)
            assert (bundle.state_step, bundle.sample_steps) == (bundle.step + 1, (bundle.step,))
        steps.append(incident.step)
        options = ["--code", str(HERE), "--set", f"args.marker={tmp_path}/again-{where}", "--json"]
        commands.append(["replay", str(run), incident.id, *options])
    answers = replayed(tmp_path, commands)
    for where, step, answer in zip(WHERE, steps, answers, strict=True):
        assert answer["status"] == 0, where
        found = json.loads(answer["out"])
        assert found["step"] == step
        assert " in strike" in found["raised"]


FP16 = {"init_scale": 1024.0, "growth_interval": 2}
KINDS: dict[str, dict[str, Any]] = {
    "Conv": {"ema": {"decay": 0.9}, "precision": "bf16", "clip_norm": 0.1},
    "CharGpt": {"args": {"optimizer": "fused", "by_tokens": True}, "clip_norm": 0.3},
    "Half": {"precision": "fp16", "scaler": FP16, "clip_norm": 5.0},
    "Weightless": {"batch_size": 8, "args": {"size": 24, "num_masked": 8}},
    "Frozen": {},
    "NoisyUpdate": {},
    "Noisy": {},
    "LowPrecision": {"reduce_dtype": "float32"},
    "feature_cases:Scored": {
        "args": {"schedule": "plateau", "scores": [3.0, 1.0, 2.0, 2.0, 2.0]},
        "evaluate": {"every_steps": 1, "every_epochs": 0},
    },
}


def test_every_step_of_any_kind_of_training_is_reproduced(train: Train, tmp_path: Path) -> None:
    commands = []
    for number, (workload, fields) in enumerate(KINDS.items()):
        more = {"max_steps": 7, "checkpoint": {"every_steps": 3}, "digest_every": 2}
        run = train(spec_of(workload, **{**more, **fields}), f"run-{number}", world_size=2)
        assert run.result, (workload, run.verdict)
        command = ["replay", str(run.folder), "--code", str(HERE), "--json"]
        commands += [[*command, "--at", "0", "--steps", "6"], [*command, "--at", "6"]]
    answers = replayed(tmp_path, commands)
    for workload, start, middle in zip(KINDS, answers[::2], answers[1::2], strict=True):
        for answer, steps in ((start, 7), (middle, 1)):
            assert answer["status"] == 0, (workload, answer)
            data = json.loads(answer["out"])
            assert (data["verdict"], data["compared"]) == ("reproduced", steps), workload
