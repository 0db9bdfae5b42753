"""What a step must come to, written down as simply as possible, to compare the engine with.

One process, `torch.autograd.grad` for each shard, the bare tree over the shards' gradients in ten
lines; no buckets, no hooks, no views. Only the order of the samples and the seeds are samestep's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import torch
from observe import Observation, observe
from torch import Tensor

from samestep import JobSpec, Loss, Workload
from samestep.exact.order import Order, ShardPlan
from samestep.exact.seeds import Purpose, seed_everything

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def tree_sum(leaves: list[Tensor | None]) -> Tensor | None:
    """The fixed binary tree over the shards; what is absent contributes nothing."""
    height = (len(leaves) - 1).bit_length()
    level = leaves + [None] * (2**height - len(leaves))
    while len(level) > 1:
        pairs = zip(level[::2], level[1::2], strict=True)
        level = [a if b is None else b if a is None else a + b for a, b in pairs]
    return level[0]


def divided(tensor: Tensor, divisor: float) -> Tensor:
    """True division, element by element; real and imaginary part alike."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    result = real / torch.full_like(real, divisor)
    return torch.view_as_complex(result) if tensor.is_complex() else result


class Reference:
    """Trains a workload step by step; `steps` yields what each step came to."""

    def __init__(self, spec: JobSpec, workload: Workload) -> None:
        self.spec, self.workload = spec, workload
        self.model = self.seeded(0, workload.model).train()
        self.data: Any = self.seeded(1, workload.data)
        self.optimizer = self.seeded(2, lambda: workload.optimizer(self.model))
        self.scheduler = self.seeded(3, lambda: workload.scheduler(self.optimizer))
        self.scaler = torch.amp.GradScaler("cpu", enabled=False)
        if spec.precision == "fp16":
            settings = spec.scaler
            self.scaler = torch.amp.GradScaler(
                "cpu",
                init_scale=settings.init_scale,
                growth_factor=settings.growth_factor,
                backoff_factor=settings.backoff_factor,
                growth_interval=settings.growth_interval,
            )
        self.order = Order(
            dataset_size=len(self.data),
            batch_size=spec.batch_size,
            shards=spec.shards,
            drop_last=spec.drop_last,
            seed=spec.seed,
            epoch_order=None if type(workload).order is Workload.order else workload.order,
        )
        self.nominal = spec.nominal_weight or float(math.ceil(spec.batch_size / spec.shards))

    def seeded(self, number: int, function: Any) -> Any:
        seed_everything(self.spec.seed, Purpose.INIT, number)
        return function()

    def steps(self, num_steps: int) -> Iterator[Observation]:
        for step in range(num_steps):
            seed_everything(self.spec.seed, Purpose.BEFORE_STEP, step)
            self.workload.before_step(self.model, step)
            trainable = [p for p in self.model.parameters() if p.requires_grad]
            before = [buffer.clone() for buffer in self.model.buffers()]
            after = before
            leaves: list[list[Tensor | None]] = []
            weighted = []
            for plan in self.order.shards_of(step):
                for buffer, old in zip(self.model.buffers(), before, strict=True):
                    buffer.copy_(old)
                gradients, value, weight = self.shard(plan, trainable)
                leaves.append(gradients)
                if weight > 0:
                    if not weighted:
                        after = [buffer.clone() for buffer in self.model.buffers()]
                    weighted.append((value, weight))
            for buffer, new in zip(self.model.buffers(), after, strict=True):
                buffer.copy_(new)
            total = math.fsum(weight for _, weight in weighted)
            for parameter in self.model.parameters():
                parameter.grad = None
            if weighted:
                for parameter, column in zip(trainable, zip(*leaves, strict=True), strict=True):
                    root = tree_sum(list(column))
                    if root is not None:
                        mean = divided(root, total / self.nominal)
                        parameter.grad = torch.empty_like(parameter).copy_(mean)
                self.update(step)
            if self.scheduler is not None:
                self.scheduler.step()
            loss = math.fsum(v * w for v, w in weighted) / total if weighted else math.nan
            yield observe(self.model, self.optimizer, self.scheduler, self.scaler, loss)

    def shard(
        self, plan: ShardPlan, trainable: list[Tensor]
    ) -> tuple[list[Tensor | None], float, float]:
        """Gradients by parameter (None: absent), loss and weight of one shard."""
        absent: list[Tensor | None] = [None] * len(trainable)
        if not plan.ids:
            return absent, math.nan, 0.0
        batch = self.batch(plan)
        seed_everything(self.spec.seed, Purpose.FORWARD, plan.step, plan.shard)
        low = self.spec.precision != "fp32"
        with torch.autocast("cpu", DTYPES[self.spec.precision]) if low else nullcontext():
            made = self.workload.loss(self.model, batch)
        value = made.value if isinstance(made, Loss) else made
        own = made.weight if isinstance(made, Loss) else None
        weight = float(len(plan.ids) if own is None else own)
        if own is not None and self.spec.nominal_weight is None and plan.step == plan.shard == 0:
            self.nominal = weight
        if weight == 0:
            return absent, math.nan, 0.0
        leaf = self.scaler.scale(value * (weight / self.nominal))
        found = torch.autograd.grad(leaf, trainable, allow_unused=True)
        if self.spec.reduce_dtype:
            found = tuple(None if g is None else g.float() for g in found)
        return list(found), float(value.detach()), weight

    def batch(self, plan: ShardPlan) -> Any:
        """Items and collate under one thread, each under its own stream."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        samples = []
        for index, position in zip(plan.ids, plan.positions, strict=True):
            seed_everything(self.spec.seed, Purpose.ITEM, plan.epoch, position)
            samples.append(self.data[index])
        seed_everything(self.spec.seed, Purpose.COLLATE, plan.step, plan.shard)
        batch = self.workload.collate(samples)
        torch.set_num_threads(threads)
        return batch

    def update(self, step: int) -> None:
        self.scaler.unscale_(self.optimizer)
        if self.spec.clip_norm is not None:
            having = [p for p in self.model.parameters() if p.grad is not None]
            norms = [torch.linalg.vector_norm(p.grad) for p in having]
            wide = torch.float64 if any(n.dtype == torch.float64 for n in norms) else torch.float32
            total = torch.linalg.vector_norm(torch.stack([norm.to(wide) for norm in norms]))
            torch.nn.utils.clip_grads_with_norm_(having, self.spec.clip_norm, total)
        seed_everything(self.spec.seed, Purpose.OPTIMIZER, step)
        self.scaler.step(self.optimizer)
        self.scaler.update()
