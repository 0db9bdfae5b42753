"""The named models: a job each, and its loss as a plain script would write it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from samestep import JobSpec, Workload, parse_spec
from samestep.spec import load_spec
from samestep.workload import load_workload

FOLDER = Path(__file__).resolve().parent
WORKLOADS = FOLDER.parents[1] / "workloads"

PlainLoss = Callable[[nn.Module, Any], Tensor]


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model to measure.

    Attributes:
        folder: where its workload's module lies; with `job.yaml` in it that is the job.
        job: fields of the job where there is no `job.yaml`.
        shard_size: samples per shard; half as many with several shards per worker, to save time.
        plain_loss: what the plain script computes from model and batch.
        draws: its forward draws random numbers, so losses of two engines differ.
        is_judged: large enough for its ratio to mean anything.
    """

    name: str
    folder: Path
    job: Mapping[str, Any] = field(default_factory=dict)
    shard_size: int
    plain_loss: PlainLoss
    draws: bool = False
    is_judged: bool = True

    def size_of_shards(self, shards_per_worker: int) -> int:
        """Samples per shard."""
        return self.shard_size if shards_per_worker == 1 else self.shard_size // 2

    def spec(self, *, shards: int, workers: int = 1, threads: int = 1) -> JobSpec:
        """The model's job at a number of shards."""
        size = self.size_of_shards(shards // workers)
        changes = {"shards": shards, "batch_size": size * shards, "threads": threads}
        if self.job:
            return parse_spec({**self.job, **changes})
        return load_spec(self.folder / "job.yaml", {**changes, "workers": 1})

    def workload(self, spec: JobSpec) -> Workload:
        """A fresh one."""
        return load_workload(spec.workload, spec.args, [self.folder])


def _mlp_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def _digits_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["image"]), batch["label"])


def _chargpt_loss(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch["input"]).flatten(0, 1), batch["target"].flatten())


MODELS = {
    model.name: model
    for model in (
        Model(
            name="mlp",
            folder=FOLDER,
            job={"workload": "mlp:Mlp", "max_steps": 1_000_000},
            shard_size=64,
            plain_loss=_mlp_loss,
        ),
        Model(
            name="chargpt",
            folder=WORKLOADS / "chargpt",
            shard_size=8,
            plain_loss=_chargpt_loss,
        ),
        Model(
            name="digits",
            folder=WORKLOADS / "digits",
            shard_size=16,
            plain_loss=_digits_loss,
            draws=True,
            is_judged=False,
        ),
    )
}
