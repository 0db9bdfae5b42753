"""The same bits for every number of workers and devices, and those of the reference."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Callable
from typing import Any

import pytest
from pool import Pool, spec_of

RunTask = Callable[..., list[list[dict[str, str]]]]
NUM_STEPS = 6
FP16 = {"init_scale": 8.0, "growth_interval": 2}
CASES: dict[str, dict[str, Any]] = {
    "mlp": spec_of("Mlp"),
    "conv": spec_of("Conv", args={"optimizer": "fused"}),
    "conv, SGD, 2 threads": spec_of("Conv", threads=2, shards=6, batch_size=13),
    "gpt": spec_of("CharGpt", args={"optimizer": "adamw"}, clip_norm=0.3),
    "gpt, fused, tokens": spec_of(
        "CharGpt", args={"optimizer": "fused", "by_tokens": True}, clip_norm=0.3, shards=8
    ),
    "gpt, tokens": spec_of("CharGpt", args={"by_tokens": True}, nominal_weight=11.0, shards=6),
    "gpt, bf16": spec_of("CharGpt", args={"optimizer": "fused"}, precision="bf16", clip_norm=1.0),
    "gpt, 2 threads": spec_of("CharGpt", args={"optimizer": "adamw"}, threads=2, clip_norm=0.5),
    "fp16": spec_of("Half", precision="fp16", scaler=FP16, clip_norm=5.0),
    "5 shards": spec_of("Conv", shards=5, batch_size=16),
    "7 shards": spec_of("Mlp", shards=7, batch_size=11),
    "12 shards": spec_of("Mlp", shards=12, batch_size=17, clip_norm=0.1),
    "empty last shards": spec_of("Mlp", shards=8, batch_size=10, args={"size": 23}),
    "idle worker": spec_of("Conv", shards=4, batch_size=8, args={"size": 17, "noisy": True}),
    "fp16, idle worker": spec_of("Half", precision="fp16", scaler=FP16, args={"size": 3}),
    "loader processes": spec_of("Noisy", shards=6, loader_processes=2, args={"noisy": True}),
    "loader processes, 2 threads": spec_of("Summing", threads=2, loader_processes=2),
    "nothing in a step": spec_of("Weightless", batch_size=8, args={"size": 24, "num_masked": 8}),
    "weightless": spec_of("Weightless", shards=5, batch_size=10, args={"size": 20}),
    "branch": spec_of("Branching", shards=6, batch_size=12),
    "frozen": spec_of("Frozen", args={"optimizer": "adamw"}),
    "bfloat16 weights": spec_of("LowPrecision", shards=7, batch_size=21),
    "reduced in float32": spec_of("LowPrecision", shards=6, reduce_dtype="float32"),
    "noise everywhere": spec_of("Noisy", shards=6, args={"noisy": True}),
    "noisy optimizer": spec_of("NoisyUpdate"),
    "dtypes": spec_of("Dtypes", clip_norm=0.5, shards=5),
    "modes": spec_of("Modes"),
    "checkpointed": spec_of("Checkpointed", shards=5),
    "buckets": spec_of("Wide", shards=6, batch_size=12, clip_norm=0.2),
    "signs of zero": spec_of("Quiet", shards=5, args={"size": 23}),
    "memory": spec_of("Memory", shards=6),
    "together": spec_of(
        "feature_cases:Together", args={"optimizer": "fused"}, clip_norm=0.1, precision="bf16"
    ),
    "sums of 2 threads": spec_of("Summing", threads=2),
}


@pytest.mark.parametrize("case", CASES)
def test_every_step_has_the_bits_of_the_reference(case: str, pool: Pool) -> None:
    spec = CASES[case]
    found = everywhere(pool, spec)
    expected = found.pop("reference")
    assert len(expected) == NUM_STEPS
    for place, steps in found.items():
        for step, (wanted, got) in enumerate(zip(expected, steps, strict=True)):
            differing = [key for key in wanted if wanted[key] != got[key]]
            assert not differing, f"{place}, step {step}: {differing}"


def test_the_scaler_backs_off_and_grows_in_the_case_that_is_to_show_it(results: RunTask) -> None:
    [steps] = results("refer", spec=CASES["fp16"], num_steps=NUM_STEPS)
    scales = [ast.literal_eval(step["scaler"])["scale"] for step in steps]
    assert any(b < a for a, b in itertools.pairwise(scales))
    assert any(b > a for a, b in itertools.pairwise(scales))


def everywhere(pool: Pool, spec: dict[str, Any]) -> dict[str, list[dict[str, str]]]:
    """What each step came to, by place; all four processes are kept busy."""
    arguments = {"spec": spec, "num_steps": NUM_STEPS}

    def workers(world_size: int) -> list[tuple[str, dict[str, Any]]]:
        where = pool.fresh_path()
        return [
            ("engine", {**arguments, "where": where, "world_rank": r, "world_size": world_size})
            for r in range(world_size)
        ]

    def devices(num_devices: int) -> tuple[str, dict[str, Any]]:
        return ("engine", {**arguments, "where": "", "num_devices": num_devices})

    rounds = [
        [*workers(4)],
        [*workers(3), devices(3)],
        [*workers(2), devices(2), ("refer", arguments)],
        [*workers(1)],
    ]
    places = [
        [f"worker {r} of 4" for r in range(4)],
        [*(f"worker {r} of 3" for r in range(3)), "3 devices"],
        [*(f"worker {r} of 2" for r in range(2)), "2 devices", "reference"],
        ["worker 0 of 1"],
    ]
    found = {}
    for tasks, names in zip(rounds, places, strict=True):
        for name, (kind, value) in zip(names, pool.run(tasks), strict=True):
            assert kind == "done", f"{name}: {value[2]}"
            found[name] = value if name == "reference" else value["steps"]
    return found
