from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from samestep import JobSpec, parse_spec
from samestep.exact import numerics


def make_spec(**fields: Any) -> JobSpec:
    return parse_spec({"workload": "m:C", "batch_size": 4, "max_steps": 1, **fields})


@pytest.fixture(autouse=True)
def kept() -> Iterator[None]:
    with numerics.GlobalsKept():
        yield


def test_threads_are_pinned_in_the_thread_that_computes() -> None:
    seen: dict[str, int] = {}

    def other() -> None:
        numerics.pin(make_spec(threads=2))
        torch.ones(4).sum()
        seen["other"] = torch.get_num_threads()

    numerics.pin(make_spec(threads=1))
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert seen == {"other": 2}


def test_pinning_makes_operations_deterministic() -> None:
    numerics.pin(make_spec())
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cudnn.benchmark
    assert not torch.backends.cuda.matmul.allow_tf32
    with pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
        torch.nn.functional.max_unpool1d(torch.ones(1, 2, 2), torch.zeros(1, 2, 2).long(), 2)


def test_what_was_pinned_is_put_back() -> None:
    torch.set_num_threads(2)
    with numerics.GlobalsKept():
        numerics.pin(make_spec(threads=1, numerics={"tf32": True}))
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2
    assert not torch.are_deterministic_algorithms_enabled()
    assert not torch.backends.cuda.matmul.allow_tf32


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        (None, {"MKL_CBWR": "AUTO"}),
        ("avx2", {"MKL_CBWR": "AVX2", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}),
    ],
)
def test_the_environment_pins_threads_alignment_and_capability(
    capability: str | None, expected: dict[str, str]
) -> None:
    variables = numerics.environment(make_spec(threads=3, numerics={"cpu_capability": capability}))
    expected = {**expected, "OMP_NUM_THREADS": "3", "MKL_NUM_THREADS": "3"}
    assert {name: variables[name] for name in expected} == expected
    assert ("ATEN_CPU_CAPABILITY" in variables) == (capability is not None)


def test_a_capability_that_is_pinned_is_the_one_in_force() -> None:
    spec = make_spec(numerics={"cpu_capability": "default"})
    code = (
        "import torch; print(torch.backends.cpu.get_cpu_capability());"
        "print(torch.get_num_threads())"
    )
    variables = {**os.environ, **numerics.environment(spec)}
    result = subprocess.run(
        [sys.executable, "-c", code],
        env=variables,
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert result.stdout.split() == ["DEFAULT", "1"]


def test_a_product_does_not_depend_on_the_alignment_of_its_operands_in_that_environment() -> None:
    code = """
import torch
differing = 0
for n in (7, 33, 64, 129):
    a, b = torch.randn(n, n), torch.randn(n, n)
    for offset in (1, 2, 3):
        room = torch.empty(n * n + 4)
        shifted = room[offset : offset + n * n].view(n, n).copy_(a)
        differing += not torch.equal(shifted @ b, a @ b)
print(differing)
"""
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **numerics.environment(make_spec())},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert result.stdout.strip() == "0"


def test_settings_that_come_too_late_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = make_spec()
    for name, value in numerics.environment(spec).items():
        monkeypatch.setenv(name, value)
    assert numerics.settings_not_in_force(spec) == []
    monkeypatch.delenv("MKL_CBWR")
    [line] = numerics.settings_not_in_force(spec)
    assert line.startswith("MKL_CBWR=AUTO is not set in this process, and torch is already loaded")


def test_a_fingerprint_differs_in_what_binds_and_names_it() -> None:
    numerics.pin(make_spec(threads=1))
    one = numerics.fingerprint(make_spec(threads=1), "cpu")
    # The recorder reads it, and has no torch.
    assert {type(value) for value in one["binding"].values()} <= {str, int, bool, type(None)}
    assert numerics.differences(one, numerics.fingerprint(make_spec(threads=1), "cpu")) == []
    numerics.pin(make_spec(threads=2))
    two = numerics.fingerprint(make_spec(threads=2, precision="bf16"), "cpu")
    lines = numerics.differences(one, two)
    assert "threads: 1 against 2" in lines
    assert "precision: 'fp32' against 'bf16'" in lines
    assert numerics.differences(one, two, kind=numerics.INFORMATIONAL) == []
    for name in ("torch", "numpy", "mkl", "onednn", "cpu_capability", "deterministic"):
        assert one["binding"][name] not in ("", None)


@pytest.mark.parametrize(
    ("precision", "dtypes", "expected"),
    [
        ("fp32", [], 1e-3),
        ("fp32", ["float32", "float64"], 1e-3),
        ("fp32", ["bfloat16", "float32"], 5e-2),
        ("bf16", ["float16", "float32"], 5e-2),
        ("fp16", ["float32"], 1e-2),
    ],
)
def test_the_tolerance_is_that_of_the_coarsest_dtype(
    precision: str, dtypes: list[str], expected: float
) -> None:
    spec = make_spec(precision=precision)
    fingerprints = [numerics.fingerprint(spec, "cpu", given) for given in ([], dtypes)]
    assert numerics.tolerance(precision, *fingerprints) == expected
