"""What a user implements, and how it is found by name.

A workload brings an ordinary `nn.Module`, a map-style `Dataset`, a loss and an optimizer from
`torch.optim`. It never sees a process group, a wrapper or the number of workers.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import inspect
import os
import shutil
import sys
import traceback
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset, default_collate

from samestep.errors import WorkloadError
from samestep.scratch import make_scratch_folder

Metrics = Mapping[str, Tensor | float]


@dataclass(frozen=True, kw_only=True)
class Loss:
    """The loss of one shard, with what else the workload wants to tell about it.

    Attributes:
        value: scalar (0-dim) floating tensor attached to the graph: the mean over the shard's
            samples, or over its tokens when `weight` counts tokens.
        metrics: by name, either a 1-dim tensor with one value per sample (summed exactly) or a
            number that is the shard's mean.
        weight: weight of the shard in the step, at least 0; None: its number of samples. A
            shard of weight 0 is absent: it adds nothing to gradient, loss or buffers.
    """

    value: Tensor
    metrics: Metrics = field(default_factory=dict)
    weight: Tensor | float | None = None


@dataclass(frozen=True)
class Schedule:
    """A learning rate schedule, and when it is stepped.

    Attributes:
        scheduler: from `torch.optim.lr_scheduler`, over the optimizer that `scheduler` was given.
        every: "step": after every step; "epoch": after the last step of every epoch;
            "evaluation": after every evaluation that is due by `evaluate.every_epochs` or
            `evaluate.every_steps` (the one at the very end of a run may not be).
        metric: name of an evaluation's metric that the scheduler's `step` is given, as
            `ReduceLROnPlateau` needs; only with `every="evaluation"`.
    """

    scheduler: LRScheduler
    _: KW_ONLY
    every: Literal["step", "epoch", "evaluation"] = "step"
    metric: str | None = None


@dataclass(frozen=True, kw_only=True)
class Values:
    """What a step came to, reduced over all shards: the same on every worker.

    Attributes:
        step: number of the step, counted from 0.
        epoch: the epoch it belongs to, counted from 0.
        loss: weighted mean over the shards; None when no shard had weight.
        grad_norm: global norm of the gradient before clipping; None without a gradient.
        lr: learning rate that the step used, one per parameter group.
        metrics: the workload's own, by name.
        skipped: the update was not applied (no weight, or an overflow under loss scaling).
        evaluation: metrics of the evaluation after this step, for `on_epoch`; None without one.
    """

    step: int
    epoch: int
    loss: float | None
    grad_norm: float | None
    lr: Sequence[float]
    metrics: Mapping[str, float]
    skipped: bool
    evaluation: Mapping[str, float] | None = None


class Workload:
    """Base class of all workloads; the first four methods must be given.

    The arguments of `__init__` are the job file's `args`. Each method is called once per worker
    process and attempt, except `loss`, `evaluate`, `order`, `collate`, `before_step` and the
    hooks. Random numbers may be drawn anywhere with torch, NumPy's global generator or `random`:
    they are seeded so that the number of workers and loader processes does not matter.

    Files: read what lies beside the workload's module through `folder`, which is right on every
    machine and in every process. Write through `output_folder`, which no other worker shares. A
    relative path means the working directory of the command (of a submitted job: the copy that Ray
    unpacked, which is thrown away); all workers of a machine share it.
    """

    _output_folder: Path | None = None

    dimensions: ClassVar[Mapping[str, Sequence[int | None]]] = {}
    """Declared dimensions of a batch's tensors, by path ("" for a bare tensor, "0", "image",
    "0.mask"); None leaves a dimension open. A batch that breaks them is refused."""

    ranges: ClassVar[Mapping[str, tuple[float | None, float | None]]] = {}
    """Least and largest value that a batch's tensors may hold, by path as in `dimensions`; None
    leaves an end open. A batch that breaks them (NaN always does) is refused before the model sees
    it; looking costs a pass over the tensors that are named here."""

    @cached_property
    def folder(self) -> Path:
        """The folder of the workload's module, wherever that lies on this machine."""
        return Path(inspect.getfile(type(self))).absolute().parent

    @cached_property
    def output_folder(self) -> Path:
        """A folder for files of this worker's own; made when first asked for, kept with the run.

        `<run>/outputs/worker-<n>`, the same for all attempts, where storage is local; else a
        temporary folder whose files are copied there when the attempt ends. Loader processes
        share their worker's. In a dry step and for evaluations afterwards it is a temporary one.
        """
        folder = self._output_folder
        if folder is None:
            folder = make_scratch_folder("output")
            weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def model(self) -> nn.Module:
        """The model on the CPU, with its initial weights."""
        raise WorkloadError(_missing(self, "model(self) -> nn.Module"))

    def data(self) -> Dataset[Any]:
        """The training data: map-style, with `__len__` and `__getitem__`."""
        raise WorkloadError(_missing(self, "data(self) -> Dataset"))

    def loss(self, model: nn.Module, batch: Any) -> Tensor | Loss:
        """Loss of one shard: `batch` is what `collate` made of its samples, on the device."""
        raise WorkloadError(_missing(self, "loss(self, model, batch) -> Tensor | Loss"))

    def optimizer(self, model: nn.Module) -> Optimizer:
        """The optimizer over the model's parameters, which already lie on their device."""
        raise WorkloadError(_missing(self, "optimizer(self, model) -> Optimizer"))

    def scheduler(self, optimizer: Optimizer) -> LRScheduler | Schedule | None:
        """A learning rate schedule; one that is not in a `Schedule` is stepped once per step.

        Take its lengths from the job's `args`, not from the number of epochs: then a run that
        is extended goes on as it would have.
        """
        return None

    def evaluation_data(self) -> Dataset[Any] | None:
        """The data that `evaluate` sees; None: no evaluation."""
        return None

    def evaluate(self, model: nn.Module, batch: Any) -> Metrics:
        """Metrics of one evaluation batch, as `Loss.metrics`; the model is in eval mode.

        Give one value per sample (a 1-dim tensor): then sums over batches are exact and the
        result does not depend on how the data is cut.
        """
        raise WorkloadError(_missing(self, "evaluate(self, model, batch) -> dict of metrics"))

    def order(self, epoch: int, generator: torch.Generator) -> Sequence[int] | Tensor | None:
        """Indices in the order in which `epoch` visits the data; None: a random permutation.

        A pure function of the epoch and the generator (seeded for the epoch). Indices may
        repeat (weighted sampling); there must be as many in every epoch.
        """
        return None

    def collate(self, samples: list[Any]) -> Any:
        """Makes one batch of a list of samples; the default is torch's `default_collate`."""
        return default_collate(samples)

    def show(self, batch: Any, index: int) -> Tensor | str | None:
        """One sample of a batch for people to look at, in the report of an incident.

        A picture (a 2-dim tensor, any range of values), a text, or None: numbers only. Called in
        replays alone (`samestep replay --report`), never in training.
        """
        return None

    def before_step(self, model: nn.Module, step: int) -> None:
        """Called on every worker before step `step` (counted from 0).

        The place to freeze and unfreeze parameters; it must do the same on every worker.
        """

    def on_step(self, step: int, values: Values) -> None:
        """Called on every worker after step `step` was applied, to look at it.

        It sees reduced values only, the same everywhere. It must not change model, optimizer or
        data, nor keep what later steps depend on: a resume does not call it again for earlier
        steps, and no checkpoint holds what it kept. What it prints, every worker prints; what
        it takes long for, all wait for.
        """

    def on_epoch(self, epoch: int, values: Values) -> None:
        """Called on every worker after the last step of epoch `epoch`, and its evaluation.

        The values are those of that step. What holds for `on_step` holds here.
        """


def load_workload(
    name: str,
    args: Mapping[str, Any],
    search: Sequence[Path],
    *,
    output_folder: Path | None = None,
) -> Workload:
    """Imports `module:Class` from the folders of `search`, then from what is installed.

    Args:
        name: `module:Class`.
        args: for its `__init__`.
        search: folders, the first one first.
        output_folder: what the workload's `output_folder` is; None: a temporary one.

    Raises:
        WorkloadError: it was not found (says where it was looked for), its import or
            constructor raised (holds the user's own traceback), or it is no Workload.
    """
    module_name, _, class_name = name.partition(":")
    for folder in reversed([str(path) for path in search]):
        if folder in sys.path:
            sys.path.remove(folder)
        sys.path.insert(0, folder)
    importlib.invalidate_caches()
    _forget_namesakes(module_name, search)
    looked = ", ".join(str(path) for path in search)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name + ".").startswith(error.name + "."):
            raise WorkloadError(
                f"workload {name!r}: no module {module_name!r}; looked in {looked} and among the "
                "installed packages"
            ) from error
        raise WorkloadError(_raised(name, "importing it", error)) from error
    except (Exception, SystemExit) as error:
        raise WorkloadError(_raised(name, "importing it", error)) from error
    cls = getattr(module, class_name, None)
    if cls is None:
        defined = sorted(
            key
            for key, value in vars(module).items()
            if isinstance(value, type) and issubclass(value, Workload) and value is not Workload
        )
        raise WorkloadError(
            f"workload {name!r}: {module.__file__} has no {class_name!r}; workloads in it: "
            f"{', '.join(defined) or 'none'}"
        )
    if not (isinstance(cls, type) and issubclass(cls, Workload)):
        raise WorkloadError(f"workload {name!r}: {cls!r} is no subclass of samestep.Workload")
    try:
        # Known in its `__init__` already, and not an argument of every workload's.
        workload: Workload = cls.__new__(cls)
        workload._output_folder = output_folder
        workload.__init__(**args)  # type: ignore[misc]
    except (Exception, SystemExit) as error:
        raise WorkloadError(_raised(name, f"{class_name}(**args)", error)) from error
    return workload


def advice_for(error: BaseException) -> str:
    """A line on what to do about an exception of the workload; empty where none is known."""
    if not isinstance(error, FileNotFoundError) or not isinstance(error.filename, str):
        return ""
    if os.path.isabs(error.filename):
        return ""
    return (
        f"A relative path is taken from the working directory ({os.getcwd()}); what lies beside "
        f"the workload's module is found through self.folder / {error.filename!r}.\n"
    )


def _forget_namesakes(module_name: str, search: Sequence[Path]) -> None:
    """Drops a module of this name that came from another folder, as of another job before."""
    top = module_name.partition(".")[0]
    cached = sys.modules.get(top)
    found = importlib.machinery.PathFinder.find_spec(top, [str(path) for path in search])
    if cached is None or found is None or found.origin == getattr(cached, "__file__", None):
        return
    for name in [name for name in sys.modules if (name + ".").startswith(top + ".")]:
        del sys.modules[name]


def _missing(workload: Workload, signature: str) -> str:
    return f"workload {type(workload).__name__} must define {signature}"


def _raised(name: str, what: str, error: BaseException) -> str:
    text = "".join(traceback.format_exception(error))
    kind = type(error).__name__
    return f"workload {name!r}: {what} raised {kind}: {error}\n{advice_for(error)}{text}"
