"""One shard computed once more with an eye on every tensor that comes by; it leaves no trace.

Hooks see what each module returns and the gradient that comes back to it, in the order in which
that happens. Gradients of parameters are asked of autograd, so that the engine's own hooks, which
put them into buckets, are not disturbed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

import torch
from torch import Tensor, nn

from samestep.engine.batch import tensors_of
from samestep.engine.shard import ShardResult, forward_shard, in_user_code
from samestep.errors import CannotReplayError, SamestepError
from samestep.exact.digest import live_digest
from samestep.exact.order import ShardPlan
from samestep.replay.raised import Raised
from samestep.replay.taking import Taker

MODEL: Final = "the model"
"""What the outermost module is called."""


class Kind(StrEnum):
    """What a tensor is."""

    INPUT = "input"
    OUTPUT = "output"
    LOSS = "loss"
    OUTPUT_GRADIENT = "gradient of output"
    GRADIENT = "gradient"
    WEIGHT = "weight"
    BUFFER = "buffer"


@dataclass(frozen=True, kw_only=True)
class Stats:
    """A tensor in numbers; the finite values only, NaN where there is none.

    Attributes:
        shape: of the tensor.
        dtype: of its elements, without `torch.`.
        mean: of the finite values; the others likewise.
        num_not_finite: NaN and infinite values.
        numel: all of them.
    """

    shape: tuple[int, ...]
    dtype: str
    mean: float
    std: float
    min: float
    max: float
    num_not_finite: int
    numel: int

    @classmethod
    def of(cls, tensor: Tensor) -> Stats:
        """Those of a tensor of any dtype."""
        values = tensor.detach()
        if values.is_complex():
            values = torch.view_as_real(values)
        finite = values.to(torch.float64)[torch.isfinite(values)]
        some = finite.numel() > 0
        return cls(
            shape=tuple(tensor.shape),
            dtype=str(tensor.dtype).removeprefix("torch."),
            mean=float(finite.mean()) if some else math.nan,
            std=float(finite.std(correction=0)) if some else math.nan,
            min=float(finite.min()) if some else math.nan,
            max=float(finite.max()) if some else math.nan,
            num_not_finite=values.numel() - finite.numel(),
            numel=values.numel(),
        )

    @property
    def rms(self) -> float:
        """Root of the mean square of the finite values."""
        return math.hypot(self.mean, self.std)

    @property
    def share_not_finite(self) -> float:
        """Of all values, in 0..1."""
        return self.num_not_finite / self.numel if self.numel else 0.0


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A tensor that came by.

    Attributes:
        kind: what it is.
        name: of the module or parameter, or the path in the batch.
        module: class of the module; empty for others.
        stats: of its values.
        digest: of its bits.
    """

    kind: Kind
    name: str
    module: str
    stats: Stats
    digest: str

    def __str__(self) -> str:
        of = f" ({self.module})" if self.module else ""
        return f"the {self.kind} of {self.name}{of}" if self.name else f"the {self.kind}"


@dataclass(frozen=True, kw_only=True)
class ShardTrace:
    """What came by in one shard, in the order of forward, then of backward.

    Attributes:
        step: of the shard.
        shard: its index.
        seen: every tensor.
        loss: of the shard; None where it raised.
        raised: what it raised.
        inside: the innermost module that was at it then; empty where none was.
    """

    step: int
    shard: int
    seen: tuple[Seen, ...]
    loss: float | None
    raised: Raised | None = None
    inside: str = ""


def trace_shard(taker: Taker, plan: ShardPlan) -> ShardTrace:
    """Computes a shard of the next step, forward and backward.

    Buffers and modes are put back; parameters have no gradients afterwards that they had not.

    Args:
        taker: at the state before the plan's step, whose `before_step` was called.
        plan: of the shard; not empty.
    """
    model, keeper = taker.parts.model, taker.replica.keeper
    watch = _Watch(model)
    keeper.start_step()
    result: ShardResult | None = None
    raised: Raised | None = None
    try:
        batch = taker.batch(plan)
        watch.take_batch(batch)
        with watch:
            result = compute(taker, batch, plan)
            watch.take(Kind.LOSS, "", "", result.loss)
            if result.weight > 0:
                watch.take_gradients(gradients(taker, result, plan))
    except CannotReplayError:
        raise
    except SamestepError as error:
        raised = Raised.of(error)
    finally:
        keeper.rewind()
    return ShardTrace(
        step=plan.step,
        shard=plan.shard,
        seen=tuple(watch.seen),
        loss=None if result is None else result.loss_value,
        raised=raised,
        inside=watch.inside if raised is not None else "",
    )


def compute(taker: Taker, batch: Any, plan: ShardPlan) -> ShardResult:
    """The forward pass of a batch, under the random streams of a shard."""
    return forward_shard(
        taker.spec,
        taker.workload,
        taker.replica.loss_of,
        batch,
        step=plan.step,
        shard=plan.shard,
        num_samples=len(plan.ids),
        device=taker.replica.device,
    )


def gradients(taker: Taker, result: ShardResult, plan: ShardPlan) -> dict[str, Tensor]:
    """The gradient of each parameter that has one, by name, last ones first.

    As the step computes them: of the loss by the shard's weight, scaled where the job scales.
    """
    named = [(n, p) for n, p in taker.parts.model.named_parameters() if p.requires_grad]
    scaler = taker.parts.scaler
    leaf = result.loss * (result.weight / taker.engine.nominal_weight)
    leaf = scaler.scale(leaf) if scaler is not None else leaf
    found = in_user_code(
        lambda: torch.autograd.grad(leaf, [p for _, p in named], allow_unused=True),
        f"backward of step {plan.step}, shard {plan.shard}",
    )
    pairs = zip(reversed(named), reversed(found), strict=True)
    return {name: gradient for (name, _), gradient in pairs if gradient is not None}


def weights_of(model: nn.Module) -> list[Seen]:
    """The parameters and floating buffers as they are."""
    named: list[tuple[Kind, str, Tensor]] = [
        *((Kind.WEIGHT, name, parameter) for name, parameter in model.named_parameters()),
        *((Kind.BUFFER, name, buffer) for name, buffer in model.named_buffers()),
    ]
    return [
        _seen(kind, name, "", tensor)
        for kind, name, tensor in named
        if tensor.is_floating_point() or tensor.is_complex()
    ]


class _Watch:
    """Hooks on every module of a model while it is entered."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._handles: list[Any] = []
        self._entered: list[str] = []
        self._calls: dict[str, int] = {}
        self._compiled: list[tuple[nn.Module, Any]] = []
        self.seen: list[Seen] = []
        self.inside = ""

    def __enter__(self) -> None:
        for name, module in self._model.named_modules():
            label = name or MODEL
            # What is compiled calls no hooks of its parts.
            self._compiled.append((module, module._compiled_call_impl))
            module._compiled_call_impl = None
            self._handles += [
                module.register_forward_pre_hook(self._before(label)),
                module.register_forward_hook(self._after(label)),
            ]

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        for handle in self._handles:
            handle.remove()
        for module, compiled in self._compiled:
            module._compiled_call_impl = compiled
        self.inside = self._entered[-1] if self._entered else ""

    def take(self, kind: Kind, name: str, module: str, tensor: Tensor) -> None:
        """Takes a tensor down."""
        self.seen.append(_seen(kind, name, module, tensor))

    def take_batch(self, batch: Any) -> None:
        """Takes the tensors of a batch down."""
        for path, tensor in tensors_of(batch):
            self.take(Kind.INPUT, f"batch.{path}" if path else "the batch", "", tensor)

    def take_gradients(self, found: dict[str, Tensor]) -> None:
        """Takes the gradients of parameters down."""
        for name, gradient in found.items():
            self.take(Kind.GRADIENT, name, "", gradient)

    def _before(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any) -> None:
            self._entered.append(f"{name} ({type(module).__name__})")

        return hook

    def _after(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: Any, output: Any) -> None:
            self._entered.pop()
            count = self._calls[name] = self._calls.get(name, 0) + 1
            label, kind = name if count == 1 else f"{name}, call {count}", type(module).__name__
            for path, tensor in tensors_of(output):
                if not (tensor.is_floating_point() or tensor.is_complex()):
                    continue
                where = f"{label}[{path}]" if path else label
                self.take(Kind.OUTPUT, where, kind, tensor)
                if tensor.requires_grad:
                    tensor.register_hook(self._gradient_of(where, kind))

        return hook

    def _gradient_of(self, name: str, module: str) -> Callable[[Tensor], None]:
        def hook(gradient: Tensor) -> None:
            self.take(Kind.OUTPUT_GRADIENT, name, module, gradient)

        return hook


def _seen(kind: Kind, name: str, module: str, tensor: Tensor) -> Seen:
    values = tensor.detach()
    return Seen(
        kind=kind,
        name=name,
        module=module,
        stats=Stats.of(values),
        digest=live_digest({"": values}),
    )
