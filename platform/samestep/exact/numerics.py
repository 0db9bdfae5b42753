"""What can change bits beside the job itself: pinning it, and a fingerprint to compare it by.

The environment must be set before torch is loaded, so `environment` needs no torch; `pin` is
called in every thread that computes (intra-op threads are counted per thread).
"""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from typing import Any, Final

from samestep.errors import NotExactError
from samestep.spec import JobSpec

BINDING = "binding"
INFORMATIONAL = "informational"
DTYPES = "dtypes"

TOLERANCE: Final = {"fp32": 1e-3, "fp16": 1e-2, "bf16": 5e-2}
"""By precision: see `tolerance`.

Chosen as the drift that reordered sums may cause over some hundred steps: about ten thousand
units in the last place of float32, ten of float16, six of bfloat16. It tells a run that learns
the same from one that does not; it promises nothing about bits.
"""
_PRECISIONS: Final = {"float16": "fp16", "bfloat16": "bf16"}

# torch.compile: kernels for dynamic shapes depend on which shapes came first, and what is not
# compiled any more (too many shapes, an error) runs in eager mode.
_COMPILER = {
    "automatic_dynamic_shapes": False,
    "fail_on_recompile_limit_hit": True,
    "suppress_errors": False,
}
_CAPABILITY = {
    None: {},
    "default": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "avx512": {"ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
}
_MKL_BRANCH = {None: "AUTO", "default": "COMPATIBLE", "avx2": "AVX2", "avx512": "AVX512"}


def environment(spec: JobSpec) -> dict[str, str]:
    """Variables that must be in force before torch is loaded.

    MKL_CBWR makes matrix products independent of the alignment of their operands, and
    TORCHINDUCTOR_DETERMINISTIC keeps torch.compile from choosing kernels by timing them.
    """
    threads = str(spec.threads)
    capability = spec.numerics.cpu_capability
    return {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
        "MKL_CBWR": _MKL_BRANCH[capability],
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "TORCHINDUCTOR_DETERMINISTIC": "1",
        **_CAPABILITY[capability],
    }


def settings_not_in_force(spec: JobSpec) -> list[str]:
    """Variables of `environment` that this process did not have, one line each.

    Where torch is already loaded (a notebook) they come too late.
    """
    effect = {
        "MKL_CBWR": "matrix products may depend on the alignment of their operands",
        "CUBLAS_WORKSPACE_CONFIG": "cuBLAS may choose another algorithm from call to call",
        "ATEN_CPU_CAPABILITY": "torch uses the widest vector instructions there are",
        "ONEDNN_MAX_CPU_ISA": "oneDNN uses the widest vector instructions there are",
    }
    return [
        f"{name}={value} is not set in this process, and torch is already loaded: {effect[name]}"
        for name, value in environment(spec).items()
        if name in effect and os.environ.get(name) != value
    ]


def pin(spec: JobSpec) -> None:
    """Pins torch's global settings; call it in every thread that computes."""
    import torch
    import torch._dynamo.config as compiler  # which every optimizer loads anyway

    torch.set_num_threads(spec.threads)
    torch.use_deterministic_algorithms(True)
    # Filling every fresh tensor would hide a read of uninitialised memory at the price of a
    # pass over memory per operation; the digests find such a read instead.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.allow_tf32 = spec.numerics.tf32
    torch.backends.cuda.matmul.allow_tf32 = spec.numerics.tf32
    for name, value in _COMPILER.items():
        setattr(compiler, name, value)  # in force in this thread only


def require_pinned(spec: JobSpec) -> None:
    """Refuses to go on when the workload's code changed what `pin` set; cheap, for every step.

    Raises:
        NotExactError: names the setting.
    """
    import torch

    threads = torch.get_num_threads()
    if threads != spec.threads:
        raise NotExactError(
            f"this thread has {threads} intra-op threads, the job says threads: {spec.threads}: "
            "the workload's code must not call torch.set_num_threads; set threads in the job file"
        )
    if not torch.are_deterministic_algorithms_enabled():
        raise NotExactError(
            "the workload's code switched torch.use_deterministic_algorithms off: leave it on"
        )


class GlobalsKept:
    """Remembers torch's global settings and puts them back (for notebooks and tests)."""

    def __enter__(self) -> None:
        """Takes the present settings down."""
        import torch
        import torch._dynamo.config as compiler

        self._compiler = {name: getattr(compiler, name) for name in _COMPILER}
        self._threads = torch.get_num_threads()
        self._deterministic = torch.are_deterministic_algorithms_enabled()
        self._fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
        cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
        self._cudnn = (cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32)
        self._matmul = matmul.allow_tf32
        self._precision = torch.get_float32_matmul_precision()

    def __exit__(self, *_: object) -> None:
        """Puts them back."""
        import torch
        import torch._dynamo.config as compiler

        for name, value in self._compiler.items():
            setattr(compiler, name, value)
        torch.set_num_threads(self._threads)
        torch.use_deterministic_algorithms(self._deterministic)
        torch.utils.deterministic.fill_uninitialized_memory = self._fill  # type: ignore[attr-defined]
        cudnn = torch.backends.cudnn
        cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32 = self._cudnn
        torch.backends.cuda.matmul.allow_tf32 = self._matmul
        torch.set_float32_matmul_precision(self._precision)


def fingerprint(
    spec: JobSpec, device_type: str, dtypes: Sequence[str] = ()
) -> dict[str, dict[str, Any]]:
    """Everything known to decide bits (binding) or suspected to (informational).

    Args:
        spec: the job.
        device_type: "cpu" or "cuda", where the shards are computed.
        dtypes: names of the floating dtypes of the model, such as "bfloat16"; none: not known.
    """
    import numpy
    import torch

    binding: dict[str, Any] = {
        "device": device_type,
        # Its own class is torch's: whoever reads that, such as the recorder, would import torch.
        "torch": str(torch.__version__),
        "numpy": numpy.__version__,
        "numpy_blas": _numpy_blas(numpy),
        "mkl": _config_line("Math Kernel Library"),
        "onednn": _config_line("MKL-DNN"),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "machine": platform.machine(),
        "threads": torch.get_num_threads(),
        "precision": spec.precision,
        "reduce_dtype": spec.reduce_dtype,
        "default_dtype": str(torch.get_default_dtype()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
    }
    for name in sorted(environment(spec)):
        binding[name] = os.environ.get(name)
    informational: dict[str, Any] = {
        "python": platform.python_version(),
        "cpu": _cpu_model(),
        "cache": _cache_sizes(),
    }
    if dtypes:  # the workload's: what equal code makes equal
        informational[DTYPES] = list(dtypes)
    if device_type == "cuda":
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        binding |= {
            "gpu": properties.name,
            "cuda": torch.version.cuda,
            "cudnn": torch.backends.cudnn.version(),
            "nccl": list(torch.cuda.nccl.version()),
            "tf32": torch.backends.cuda.matmul.allow_tf32,
            "cudnn_tf32": torch.backends.cudnn.allow_tf32,
            "cudnn_benchmark": torch.backends.cudnn.benchmark,
        }
        informational["gpu_memory_bytes"] = properties.total_memory
    return {BINDING: binding, INFORMATIONAL: informational}


def differences(a: Mapping[str, Any], b: Mapping[str, Any], *, kind: str = BINDING) -> list[str]:
    """Lines `name: value in a, value in b` where two fingerprints differ."""
    left, right = a.get(kind, {}), b.get(kind, {})
    return [
        f"{name}: {left.get(name)!r} against {right.get(name)!r}"
        for name in sorted({*left, *right})
        if left.get(name) != right.get(name)
    ]


def tolerance(precision: str, *fingerprints: Mapping[str, Any]) -> float:
    """Relative tolerance (absolute below 1) for a step taken under other numerics.

    Args:
        precision: the spec's.
        fingerprints: of those compared; the coarsest dtype of their models decides as well.
    """
    dtypes = {name for each in fingerprints for name in each.get(INFORMATIONAL, {}).get(DTYPES, ())}
    named = {_PRECISIONS[dtype] for dtype in dtypes if dtype in _PRECISIONS}
    return max(TOLERANCE[name] for name in {precision, *named})


def _config_line(part: str) -> str:
    import torch

    lines = (line.strip(" -") for line in torch.__config__.show().splitlines())
    return next((line for line in lines if part in line), "")


def _numpy_blas(numpy: Any) -> str:
    try:
        blas = numpy.show_config(mode="dicts")["Build Dependencies"]["blas"]
    except (KeyError, TypeError):
        return ""
    return f"{blas.get('name')} {blas.get('version')}"


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            lines = [line for line in file if line.startswith("model name")]
    except OSError:
        return platform.processor()
    return lines[0].partition(":")[2].strip() if lines else platform.processor()


def _cache_sizes() -> dict[str, str]:
    sizes = {}
    for index in range(4):
        folder = f"/sys/devices/system/cpu/cpu0/cache/index{index}"
        try:
            with open(f"{folder}/level") as level, open(f"{folder}/type") as kind:
                key = f"L{level.read().strip()}{kind.read().strip()[0].lower()}"
            with open(f"{folder}/size") as size:
                sizes[key] = size.read().strip()
        except OSError:
            continue
    return sizes
