"""What a user implements, and how it is found by name.

A workload brings an ordinary `nn.Module`, a map-style `Dataset`, a loss and an optimizer from
`torch.optim`. It never sees a process group, a wrapper or the number of workers.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset, default_collate

from samestep.errors import WorkloadError

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


class Workload:
    """Base class of all workloads; the first four methods must be given.

    The arguments of `__init__` are the job file's `args`. Each method is called once per worker
    process and attempt, except `loss`, `evaluate`, `order`, `collate` and `before_step`. Random
    numbers may be drawn anywhere with torch, NumPy's global generator or `random`: they are
    seeded so that the number of workers and loader processes does not matter.
    """

    dimensions: ClassVar[Mapping[str, Sequence[int | None]]] = {}
    """Declared dimensions of a batch's tensors, by path ("" for a bare tensor, "0", "image",
    "0.mask"); None leaves a dimension open. A batch that breaks them is refused."""

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

    def scheduler(self, optimizer: Optimizer) -> LRScheduler | None:
        """A learning rate schedule, stepped once per step.

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

    def before_step(self, model: nn.Module, step: int) -> None:
        """Called on every worker before step `step` (counted from 0).

        The place to freeze and unfreeze parameters; it must do the same on every worker.
        """


def load_workload(name: str, args: Mapping[str, Any], search: Sequence[Path]) -> Workload:
    """Imports `module:Class` from the folders of `search`, then from what is installed.

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
    except Exception as error:
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
        return cls(**args)
    except Exception as error:
        raise WorkloadError(_raised(name, f"{class_name}(**args)", error)) from error


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
    return f"workload {name!r}: {what} raised {type(error).__name__}: {error}\n{text}"
