"""Flat persistent gradient buckets: gradients are views of them, hooks say when one is done.

The first leaf of a pair is copied in as autograd hands it over; autograd adds the second one in
place. An absent leaf is -0.0, the identity of addition bit for bit (+0.0 is not: it turns -0.0 into
+0.0), and so is all padding. Buffers live as long as the engine: fresh ones cost page faults.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from samestep.errors import NotExactError
from samestep.exact.digest import short_digest
from samestep.exact.tree import LocalPlan

FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20
ALIGNMENT_BYTES = 64

NamedParameters = Sequence[tuple[str, nn.Parameter]]


@dataclass(frozen=True, kw_only=True)
class BucketLayout:
    """Where each parameter's gradient lies in one bucket.

    Attributes:
        dtype: dtype of the sums; complex parameters lie in it as pairs.
        parameters: indices into the trainable parameters.
        offsets: start of each, in elements.
        marks: start of the presence marks (last bucket only), one element per parameter.
        numel: length in elements; the same slice length for every worker.
    """

    dtype: torch.dtype
    parameters: tuple[int, ...]
    offsets: tuple[int, ...]
    marks: int | None
    numel: int


def trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Parameters that require a gradient, in order of registration, tied ones once."""
    return [(name, p) for name, p in model.named_parameters() if p.requires_grad]


def trainable_digest(parameters: NamedParameters) -> str:
    """A short hash of what the buckets hold: names, shapes, strides, dtypes."""
    text = repr([(n, tuple(p.shape), p.stride(), str(p.dtype)) for n, p in parameters])
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def layout_buckets(
    parameters: NamedParameters, *, world_size: int, reduce_dtype: torch.dtype | None
) -> list[BucketLayout]:
    """Cuts the trainable parameters into buckets of about 25 MB, the first one small.

    Parameters go in reverse order of registration, since backward tends to finish the last ones
    first. Only the padding at the end depends on the number of workers.

    Raises:
        NotExactError: a parameter that is not dense and non-overlapping.
    """
    _refuse_overlapping(parameters)
    groups: list[tuple[torch.dtype, list[int]]] = []
    filled: dict[torch.dtype, int] = {}
    for index in reversed(range(len(parameters))):
        parameter = parameters[index][1]
        dtype = reduce_dtype or parameter.dtype.to_real()
        size = _length(parameter) * dtype.itemsize
        current = next((g for g in reversed(groups) if g[0] == dtype), None)
        limit = FIRST_BUCKET_BYTES if len(groups) == 1 else BUCKET_BYTES
        if current is None or filled[dtype] + size > limit:
            groups.append((dtype, [index]))
            filled[dtype] = size
        else:
            current[1].append(index)
            filled[dtype] += size
    layouts = []
    for number, (dtype, members) in enumerate(groups):
        step = ALIGNMENT_BYTES // dtype.itemsize
        offsets, end = [], 0
        for index in members:
            offsets.append(end)
            end += -(-_length(parameters[index][1]) // step) * step
        marks = None
        if number == len(groups) - 1:
            marks, end = end, end + len(parameters)
        unit = step * world_size
        layouts.append(
            BucketLayout(
                dtype=dtype,
                parameters=tuple(members),
                offsets=tuple(offsets),
                marks=marks,
                numel=-(-end // unit) * unit,
            )
        )
    return layouts


class Buckets:
    """The gradient buffers of one model replica, and the hooks that fill them.

    One shard after another: `start_shard`, the workload's backward, `end_shard`; then `flush`.
    A bucket of the last shard is complete as soon as its parameters are, while backward goes on.

    Args:
        parameters: the trainable parameters.
        layouts: from `layout_buckets`.
        plan: how the shards of this replica are summed.
        on_complete: called with a bucket's number once its subtree sums are final.
    """

    def __init__(
        self,
        parameters: NamedParameters,
        layouts: Sequence[BucketLayout],
        plan: LocalPlan,
        on_complete: Callable[[int], None],
    ) -> None:
        self.parameters = parameters
        self.layouts = layouts
        self.plan = plan
        self._on_complete = on_complete
        self._convert = any(
            layout.dtype != parameters[i][1].dtype.to_real()
            for layout in layouts
            for i in layout.parameters
        )
        device = parameters[0][1].device
        num_buffers = plan.num_slots + 1
        self._buffers = [
            [
                torch.full((layout.numel,), -0.0, dtype=layout.dtype, device=device)
                for _ in range(num_buffers)
            ]
            for layout in layouts
        ]
        self._views = [self._views_of(bucket) for bucket in range(len(layouts))]
        self._bucket_of = {i: b for b, layout in enumerate(layouts) for i in layout.parameters}
        self._place = {i: place for layout in layouts for place, i in enumerate(layout.parameters)}
        # Which buffer plays which part: swapping numbers costs nothing, copying would.
        self._active = [0] * len(layouts)
        self._slots = [list(range(1, num_buffers)) for _ in layouts]
        self._present = [False] * len(parameters)
        self._fired = [False] * len(parameters)
        self._remaining = [0] * len(layouts)
        self._on_top = False
        self._complete = [True] * len(layouts)
        self._shard = -1
        self._in_backward = self._dry = False
        self._watched: int | None = None
        self._seen: dict[str, str] = {}
        self._handles = [
            p.register_post_accumulate_grad_hook(self._hook_of(i))
            for i, (_, p) in enumerate(parameters)
        ]

    @property
    def num_buffers(self) -> int:
        """Gradient-sized buffers held, the active one included."""
        return self.plan.num_slots + 1

    def start_step(self) -> None:
        """Forgets the step before."""
        self._present = [False] * len(self.parameters)
        self._complete = [False] * len(self.layouts)
        self._shard = -1

    def start_shard(self) -> None:
        """Prepares the gradients for the next shard's backward, if it has one."""
        self._shard += 1
        self._fired = [False] * len(self.parameters)
        self._remaining = [len(layout.parameters) for layout in self.layouts]
        self._on_top = self._shard > 0 and self.plan.pushes[self._shard - 1].on_top
        if not self._on_top:
            # Only the marks are left of what the buffer held: all else is copied over or filled.
            self._marks().fill_(-0.0)
        for bucket, layout in enumerate(self.layouts):
            views = self._views[bucket][self._active[bucket]]
            for index, view in zip(layout.parameters, views, strict=True):
                self.parameters[index][1].grad = view if self._on_top else None

    def backward(self, loss: Tensor, *, dry: bool = False) -> None:
        """Backward of the present shard; gradients land in the buckets.

        Args:
            loss: 0-dim.
            dry: complete no bucket, whatever shard it is (for the canary).
        """
        self._in_backward, self._dry = True, dry
        try:
            loss.backward()
        finally:
            self._in_backward = False

    def end_shard(self) -> None:
        """Pushes the present shard's leaf, present or absent, into the partial sums."""
        if self._shard + 1 < len(self.plan.pushes):
            for bucket in range(len(self.layouts)):
                self._fill_absent(bucket)
                self._look(bucket)
                self._push(bucket)

    def flush(self) -> None:
        """Completes what the last backward left: unused parameters, then the presence marks."""
        for bucket in range(len(self.layouts)):
            if not self._complete[bucket]:
                self._finish(bucket)

    def watch(self, turn: int | None) -> None:
        """Takes digests of what is in the active buffers after one of the step's shards.

        Args:
            turn: place of the shard among this replica's; None: of none of them.
        """
        self._watched, self._seen = turn, {}

    @property
    def seen(self) -> dict[str, str]:
        """Those digests, by parameter; empty if there was nothing to watch."""
        return self._seen

    def start_apart(self, *, on_top: bool) -> None:
        """Prepares the active buffers for a shard that is no part of the step's sums.

        Args:
            on_top: its gradients are added to those of the shard before.
        """
        self._fired = [False] * len(self.parameters)
        self._remaining = [len(layout.parameters) for layout in self.layouts]
        self._on_top = on_top
        for bucket, layout in enumerate(self.layouts):
            views = self._views[bucket][self._active[bucket]]
            for index, view in zip(layout.parameters, views, strict=True):
                self.parameters[index][1].grad = view if on_top else None

    def end_apart(self) -> None:
        """After the backward of such a shard, if it had one."""
        for bucket in range(len(self.layouts)):
            self._fill_absent(bucket)

    def leaf_digests(self) -> dict[str, str]:
        """Digests of what is in the active buffers, by parameter."""
        return {name: short_digest(view) for name, view in self.digest_source().items()}

    def active(self, bucket: int) -> Tensor:
        """The flat buffer that gradients are views of; after the exchange, the result."""
        return self._buffers[bucket][self._active[bucket]]

    def sums(self, bucket: int) -> list[tuple[tuple[int, int], Tensor]]:
        """The subtree sums of a complete bucket: (node, flat tensor)."""
        buffers, slots = self._buffers[bucket], self._slots[bucket]
        return [
            (node, self.active(bucket) if slot is None else buffers[slots[slot]])
            for node, slot in zip(self.plan.nodes, self.plan.slots, strict=True)
        ]

    def publish(self) -> list[nn.Parameter]:
        """After the exchange: points each `grad` at the result; None where no shard had one.

        Returns:
            The parameters that have a gradient.
        """
        marks = self._marks().tolist()
        having = []
        for index, (_, parameter) in enumerate(self.parameters):
            if not marks[index] > 0:
                parameter.grad = None
                continue
            bucket = self._bucket_of[index]
            view = self._views[bucket][self._active[bucket]][self._place[index]]
            parameter.grad = view.to(parameter.dtype) if self._convert else view
            having.append(parameter)
        return having

    def digest_source(self) -> dict[str, Tensor]:
        """The present leaf's gradients by parameter name, for comparing digests."""
        for bucket in range(len(self.layouts)):
            self._fill_absent(bucket)
        return {
            name: self._views[self._bucket_of[i]][self._active[self._bucket_of[i]]][self._place[i]]
            for i, (name, _) in enumerate(self.parameters)
        }

    def close(self) -> None:
        """Takes the hooks off and lets the gradients go, and whoever waited for buckets."""
        for handle in self._handles:
            handle.remove()
        self._on_complete = _nobody
        for _, parameter in self.parameters:
            parameter.grad = None

    def _views_of(self, bucket: int) -> list[list[Tensor]]:
        layout = self.layouts[bucket]
        return [
            [
                _view(buffer, self.parameters[i][1], offset)
                for i, offset in zip(layout.parameters, layout.offsets, strict=True)
            ]
            for buffer in self._buffers[bucket]
        ]

    def _hook_of(self, index: int) -> Callable[[Tensor], None]:
        def hook(parameter: Tensor) -> None:
            self._accumulated(index, parameter)

        return hook

    def _accumulated(self, index: int, parameter: Tensor) -> None:
        name = self.parameters[index][0]
        if not self._in_backward:
            raise NotExactError(
                f"parameter {name} got a gradient outside of the step's backward: the loss method "
                "must return the loss, not call backward() (torch.autograd.grad is fine)"
            )
        if self._fired[index]:
            raise NotExactError(
                f"parameter {name} got its gradient in several parts, so their sum would depend "
                "on the shards before: use torch.utils.checkpoint with use_reentrant=False"
            )
        bucket = self._bucket_of[index]
        view = self._views[bucket][self._active[bucket]][self._place[index]]
        gradient = parameter.grad
        assert gradient is not None
        if gradient.requires_grad or (self._on_top and gradient is not view):
            raise NotExactError(
                f"the gradient of {name} was replaced during backward; samestep can't keep the "
                "bits with create_graph=True or hooks that set .grad"
            )
        if not self._on_top:
            _refuse_sparse(name, gradient)
            view.copy_(gradient)
            parameter.grad = None
        self._fired[index] = self._present[index] = True
        self._remaining[bucket] -= 1
        is_last_shard = self._shard + 1 == len(self.plan.pushes) and not self._dry
        # The last bucket carries the marks, which are known only after backward.
        if is_last_shard and self._remaining[bucket] == 0 and self.layouts[bucket].marks is None:
            self._finish(bucket)

    def _finish(self, bucket: int) -> None:
        self._fill_absent(bucket)
        if self.layouts[bucket].marks is not None:
            self._marks().copy_(torch.tensor([1.0 if p else -0.0 for p in self._present]))
        self._look(bucket)
        self._push(bucket)
        self._complete[bucket] = True
        self._on_complete(bucket)

    def _look(self, bucket: int) -> None:
        if self._shard != self._watched:
            return
        views = self._views[bucket][self._active[bucket]]
        for index, view in zip(self.layouts[bucket].parameters, views, strict=True):
            self._seen[self.parameters[index][0]] = short_digest(view)

    def _marks(self) -> Tensor:
        start = self.layouts[-1].marks
        assert start is not None
        return self.active(len(self.layouts) - 1)[start : start + len(self.parameters)]

    def _fill_absent(self, bucket: int) -> None:
        if self._on_top or self._remaining[bucket] == 0:
            return
        views = self._views[bucket][self._active[bucket]]
        for index, view in zip(self.layouts[bucket].parameters, views, strict=True):
            if not self._fired[index]:
                view.fill_(-0.0)

    def _push(self, bucket: int) -> None:
        push = self.plan.pushes[self._shard]
        buffers, slots = self._buffers[bucket], self._slots[bucket]
        active = self.active(bucket)
        for slot in push.merge:
            torch.add(buffers[slots[slot]], active, out=active)
        if push.keep is not None:
            self._active[bucket], slots[push.keep] = slots[push.keep], self._active[bucket]


def _refuse_sparse(name: str, gradient: Tensor) -> None:
    if gradient.layout is not torch.strided:
        raise NotExactError(
            f"the gradient of {name} is sparse ({gradient.layout}): make it dense "
            "(sparse=False, or grad.to_dense() in a hook of yours)"
        )


def _nobody(_: int) -> None:
    """Who is told of complete buckets once the buckets are closed."""


def _length(parameter: Tensor) -> int:
    """Elements of the sums that a parameter takes."""
    return parameter.numel() * (2 if parameter.is_complex() else 1)


def _view(buffer: Tensor, parameter: Tensor, offset: int) -> Tensor:
    # Strided as the parameter: channels_last keeps its layout.
    if parameter.is_complex():
        buffer, offset = torch.view_as_complex(buffer.view(-1, 2)), offset // 2
    return buffer.as_strided(parameter.size(), parameter.stride(), offset)


def _refuse_overlapping(parameters: NamedParameters) -> None:
    for name, parameter in parameters:
        expected = 1
        strided = sorted(
            (stride, size)
            for size, stride in zip(parameter.shape, parameter.stride(), strict=True)
            if size > 1
        )
        for stride, size in strided:
            if stride != expected:
                raise NotExactError(
                    f"parameter {name} is not dense (shape {tuple(parameter.shape)}, strides "
                    f"{parameter.stride()}): its gradient would overlap; make it contiguous with "
                    "nn.Parameter(p.contiguous())"
                )
            expected *= size
