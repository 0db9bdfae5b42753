"""The workloads of the engine's tests: small, and each with something that breaks bits."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, MultiStepLR
from torch.utils.data import Dataset

from samestep import Loss, Values, Workload


class Rows(Dataset[Any]):
    """Rows of numbers and a target, a function of the index; noise is drawn in `__getitem__`."""

    def __init__(self, size: int, shape: tuple[int, ...], *, noisy: bool = False) -> None:
        stream = torch.Generator().manual_seed(11)
        self.x = torch.randn(size, *shape, generator=stream)
        self.y = self.x.flatten(1)[:, :3].sum(1, keepdim=True)
        self.noisy = noisy

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = self.x[index]
        if self.noisy:
            x = x + 0.1 * torch.randn_like(x) + random.random() + float(np.random.rand())
        return x, self.y[index]


class Base(Workload):
    """An MLP with SGD; the others change a part of it.

    Args:
        size: samples.
        optimizer: sgd, adamw or fused.
        lr: learning rate.
        noisy: draw random numbers in `__getitem__` and collate.
    """

    shape: tuple[int, ...] = (6,)

    def __init__(
        self, *, size: int = 37, optimizer: str = "sgd", lr: float = 0.05, noisy: bool = False
    ) -> None:
        self.size, self.kind, self.lr, self.noisy = size, optimizer, lr, noisy

    def net(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 1))

    def model(self) -> nn.Module:
        return self.net()

    def data(self) -> Dataset[Any]:
        return Rows(self.size, self.shape, noisy=self.noisy)

    def collate(self, samples: list[Any]) -> Any:
        if not self.noisy:
            return super().collate(samples)
        random.shuffle(samples)
        x, y = super().collate(samples)
        return x * (1 + 0.01 * torch.rand(len(x), *[1] * (x.ndim - 1))), y

    def loss(self, model: nn.Module, batch: Any) -> Tensor | Loss:
        return F.mse_loss(model(batch[0]), batch[1])

    def optimizer(self, model: nn.Module) -> Optimizer:
        if self.kind == "sgd":
            return SGD(model.parameters(), lr=self.lr, momentum=0.9, weight_decay=0.01)
        return AdamW(model.parameters(), lr=self.lr, fused=self.kind == "fused")


class Large(Base):
    """A state of 13 MB, most of it in two tensors: large enough for a writer process."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"lr": 1e-4, **kwargs})  # a larger one makes so wide a net diverge

    def net(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(6, 1600), nn.Tanh(), nn.Linear(1600, 1000), nn.Linear(1000, 1)
        )


class Blocking(Large):
    """Puts what is no manifest where the last checkpoint of 6 steps should be.

    Args:
        folder: the run directory.
    """

    def __init__(self, *, folder: str) -> None:
        super().__init__()
        self.folder = folder

    def on_step(self, step: int, values: Values) -> None:
        if step == 5:
            path = Path(self.folder, "checkpoints/step-00000006/manifest.json")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("of something else")


class Mlp(Base):
    """The plain one."""


class Conv(Base):
    """Convolutions, BatchNorm, dropout, channels_last."""

    shape = (3, 6, 6)

    def net(self) -> nn.Module:
        net = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 4, 3),
            nn.BatchNorm2d(4, momentum=None),
            nn.Dropout(0.3),
            nn.Flatten(),
            nn.Linear(64, 1),
        )
        return net.to(memory_format=torch.channels_last)

    def loss(self, model: nn.Module, batch: Any) -> Tensor | Loss:
        x = batch[0].to(memory_format=torch.channels_last)
        return Loss(value=F.mse_loss(model(x), batch[1]), metrics={"x": batch[0].flatten(1).sum(1)})


class Block(nn.Module):
    """Causal self-attention by SDPA, and an MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        n, t, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(n, t, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.1)
        x = x + self.out(y.transpose(1, 2).reshape(n, t, width))
        return x + self.mlp(self.norm2(x))


class Gpt(nn.Module):
    """Tied embedding and head."""

    def __init__(self, vocabulary: int = 11, width: int = 16, context: int = 8) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(0.02 * torch.randn(context, width))
        self.blocks = nn.Sequential(Block(width), Block(width))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.position
        return self.head(self.norm(self.blocks(x)))


class Tokens(Dataset[Tensor]):
    """Nine tokens per sample; those of some samples are partly, of one wholly, to be ignored."""

    def __init__(self, size: int) -> None:
        self.tokens = torch.randint(0, 11, (size, 9), generator=torch.Generator().manual_seed(5))
        for index in range(0, size, 3):
            self.tokens[index, 4 + index % 5 :] = -100

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> Tensor:
        return self.tokens[index]


class CharGpt(Base):
    """A small GPT: tied weights, SDPA, cosine schedule, weighted by tokens on demand.

    Args:
        by_tokens: the shard's weight is its number of tokens; else its number of samples.
    """

    def __init__(self, *, by_tokens: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.by_tokens = by_tokens

    def net(self) -> nn.Module:
        return Gpt()

    def data(self) -> Dataset[Any]:
        return Tokens(self.size)

    def loss(self, model: nn.Module, batch: Any) -> Tensor | Loss:
        target = batch[:, 1:]
        logits = model(batch[:, :-1].clamp(min=0))
        value = F.cross_entropy(logits.float().flatten(0, 1), target.flatten())
        return Loss(value=value, weight=(target >= 0).sum()) if self.by_tokens else value

    def scheduler(self, optimizer: Optimizer) -> LRScheduler:
        return CosineAnnealingLR(optimizer, 8)


class Half(Base):
    """Overflows fp16 at some steps, so that the scaler backs off and grows again."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor | Loss:
        out = model(batch[0])
        return F.mse_loss(out, batch[1].to(out.dtype))

    def before_step(self, model: nn.Module, step: int) -> None:
        if step in (3, 4):
            with torch.no_grad():
                model[2].weight.mul_(2.0**16 if step == 3 else 2.0**-16)  # type: ignore[index]


class Weightless(Base):
    """A shard whose samples are all masked has weight 0 and a NaN loss; its buffers are NaN."""

    def __init__(self, *, num_masked: int = 6, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.num_masked = num_masked

    def net(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.Tanh(), nn.Linear(9, 1))

    def order(self, epoch: int, generator: torch.Generator) -> Sequence[int]:
        # The first samples are masked; by two, they are the first or a middle shard of a step, or
        # all shards of one.
        n = self.num_masked
        rest = (torch.randperm(self.size - n, generator=generator) + n).tolist()
        if n == 8:
            return [*rest[:8], *range(8), *rest[8:]]
        return [*rest[:2], 0, 1, *rest[2:8], 2, 3, *rest[8:10], 4, 5, *rest[10:]]

    def data(self) -> Dataset[Any]:
        rows = Rows(self.size, self.shape)
        rows.x[: self.num_masked] = float("nan")
        return rows

    def loss(self, model: nn.Module, batch: Any) -> Tensor | Loss:
        keep = ~batch[0].isnan().any(1)
        per_sample = F.mse_loss(model(batch[0]), batch[1], reduction="none").flatten()
        return Loss(
            value=per_sample.sum() / keep.sum(), metrics={"l": per_sample}, weight=keep.sum()
        )


class Branches(nn.Module):
    """One branch is taken for some samples only, one layer never, one weight gives zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.left, self.right = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.never = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor, rare: bool) -> Tensor:
        h = self.stem(x).relu()
        return self.head(self.left(h) if rare else self.right(h))


class Branching(Base):
    """Only the shard that holds sample 0 goes left: in most steps no shard does."""

    def net(self) -> nn.Module:
        return Branches()

    def data(self) -> Dataset[Any]:
        rows = Rows(self.size, self.shape)
        rows.x[0] = 100.0
        return rows

    def loss(self, model: nn.Module, batch: Any) -> Tensor | Loss:
        return F.mse_loss(model(batch[0] / 10, bool((batch[0] > 50).any())), batch[1])


class Frozen(Base):
    """The first layer is frozen before step 2 and trained again from step 4."""

    def before_step(self, model: nn.Module, step: int) -> None:
        for parameter in model[0].parameters():  # type: ignore[index]
            parameter.requires_grad_(not 2 <= step < 4)


class LowPrecision(Base):
    """Parameters kept in bfloat16."""

    def net(self) -> nn.Module:
        return super().net().to(torch.bfloat16)

    def loss(self, model: nn.Module, batch: Any) -> Tensor | Loss:
        return F.mse_loss(model(batch[0].bfloat16()), batch[1].bfloat16())


class Noisy(Base):
    """NumPy's, Python's and torch's numbers in forward, and before the step."""

    def before_step(self, model: nn.Module, step: int) -> None:
        self.factor = 1 + 0.01 * random.random()
        with torch.no_grad():
            model[0].bias.add_(1e-3 * torch.randn(9))  # type: ignore[index,union-attr]

    def order(self, epoch: int, generator: torch.Generator) -> Tensor:
        # The global generator: seeded for the epoch as well.
        return torch.randint(0, self.size, (self.size,))

    def loss(self, model: nn.Module, batch: Any) -> Tensor | Loss:
        x = batch[0] * float(np.random.rand()) + random.gauss(0, 1)
        return F.mse_loss(model(F.dropout(x, 0.2)) * self.factor, batch[1])


class Summing(Base):
    """Items and batches are sums over so many numbers that two threads would share them."""

    def data(self) -> Dataset[Any]:
        return Sums(self.size)

    def collate(self, samples: list[Any]) -> Any:
        x, y = super().collate(samples)
        return x + torch.rand(100_000).sum() / 1e5, y


class Sums(Rows):
    def __init__(self, size: int) -> None:
        super().__init__(size, (6,))

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = super().__getitem__(index)
        return x + torch.randn(100_000).sum() / 1e3, y


class Remembering(nn.Module):
    """What one forward leaves in a buffer, the next one computes with."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 1)
        self.register_buffer("memory", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x + self.memory)
        with torch.no_grad():
            self.memory.lerp_(x.mean(0), 0.3)
        return y


class Memory(Base):
    """A buffer that is used in forward."""

    def net(self) -> nn.Module:
        return Remembering()


class Langevin(SGD):
    """Adds noise to every step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(0.01 * torch.randn_like(parameter))


class NoisyUpdate(Base):
    """An optimizer that draws."""

    def optimizer(self, model: nn.Module) -> Optimizer:
        return Langevin(model.parameters(), lr=0.05)

    def scheduler(self, optimizer: Optimizer) -> LRScheduler:
        return MultiStepLR(optimizer, [2, 4])


class Mixed(nn.Module):
    """Parameters of four dtypes, one of them complex, and one without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 5)
        self.b = nn.Linear(5, 4).to(torch.bfloat16)
        self.c = nn.Linear(4, 1).double()
        self.z = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.empty = nn.Parameter(torch.zeros(0, 3))

    def forward(self, x: Tensor) -> Tensor:
        h = self.b(self.a(x).tanh().bfloat16()).float()
        h = (torch.fft.fft(h) * self.z).real + self.empty.sum()
        return self.c(h.double()).float()


class Dtypes(Base):
    """Several dtypes in one model."""

    def net(self) -> nn.Module:
        return Mixed()


class Modes(Base):
    """The model comes in eval mode, with dropout in it, whose share follows the step."""

    def net(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 9), nn.Dropout(0.4), nn.Linear(9, 1)).eval()

    def before_step(self, model: nn.Module, step: int) -> None:
        model[1].p = 0.1 * step  # type: ignore[index]


class Checkpointed(Base):
    """Activation checkpointing (not reentrant) of a layer that is used twice."""

    def net(self) -> nn.Module:
        return nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.2), nn.Linear(6, 1))

    def loss(self, model: nn.Module, batch: Any) -> Tensor | Loss:
        from torch.utils.checkpoint import checkpoint

        layer: Any = model[:2]  # type: ignore[index]
        h = checkpoint(layer, batch[0], use_reentrant=False)
        h = checkpoint(layer, h, use_reentrant=False)
        return F.mse_loss(model[2](h), batch[1])  # type: ignore[index]


class Wide(Base):
    """More than one bucket: two of the matrices are larger than the first bucket's limit."""

    def net(self) -> nn.Module:
        return nn.Sequential(
            nn.Linear(6, 600), nn.ReLU(), nn.Linear(600, 600), nn.ReLU(), nn.Linear(600, 1)
        )


class Quiet(Base):
    """All gradients are -0.0 or absent, and the optimizer tells -0.0 from +0.0."""

    def net(self) -> nn.Module:
        net = nn.Linear(6, 1, bias=False)
        nn.init.constant_(net.weight, -0.0)
        return net

    def loss(self, model: nn.Module, batch: Any) -> Tensor | Loss:
        return (model.weight * -0.0).sum()  # type: ignore[operator]

    def optimizer(self, model: nn.Module) -> Optimizer:
        return SignSgd(model.parameters(), lr=0.1)


class SignSgd(SGD):
    """Steps by the sign bit of the gradient: +0.0 and -0.0 are told apart."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(torch.where(torch.signbit(parameter.grad), 0.5, -0.25))
