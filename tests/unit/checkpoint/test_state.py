"""Straight runs against runs that were saved, read back into fresh objects and continued."""

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim import lr_scheduler as schedules

from samestep.checkpoint.committed import commit
from samestep.checkpoint.encode import TensorRef
from samestep.checkpoint.manifest import CheckpointMeta
from samestep.checkpoint.reading import load_checkpoint, load_weights
from samestep.checkpoint.state import (
    Parts,
    State,
    check_encodable,
    collect,
    restore,
    state_sha256,
)
from samestep.checkpoint.storage import Storage
from samestep.checkpoint.writing import write_files
from samestep.errors import CheckpointError
from samestep.exact.digest import live_digest

META = CheckpointMeta(numerics={"torch": "x"}, spec={"seed": 0}, created_s=1.5)


class Net(nn.Module):
    """Ties, both kinds of buffers, extra state, a submodule called `module`, a 0-dim parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 4, bias=False)
        self.head.weight = self.module.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64), persistent=False)
        self.register_buffer("cache", None, persistent=False)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen += 1
        self.cache = torch.full((self.calls,), 2.0)
        return self.head(self.norm(self.module(x)).relu()) * self.scale

    def get_extra_state(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]


def make(
    optimizer: Callable[..., Optimizer] = Adam,
    schedule: Callable[[Optimizer], Any] | None = None,
    *,
    scaled: bool = False,
    net: Callable[[], nn.Module] = Net,
    seed: int = 0,
    **options: Any,
) -> Parts:
    torch.manual_seed(seed)
    model = net()
    built = optimizer(model.parameters(), lr=0.05, **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2) if scaled else None
    return Parts(
        model=model,
        optimizer=built,
        scheduler=schedule(built) if schedule else None,
        scaler=scaler,
    )


def take(parts: Parts, steps: range, shape: tuple[int, ...] = (6, 4)) -> list[float]:
    """Takes the steps and returns the learning rate that each of them used."""
    rates = []
    for step in steps:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(100 + step))
        parts.optimizer.zero_grad()
        loss = parts.model(x).square().mean()
        rates.append(float(parts.optimizer.param_groups[0]["lr"]))
        if parts.scaler is None:
            loss.backward()
            parts.optimizer.step()
        else:
            parts.scaler.scale(loss).backward()
            parts.scaler.step(parts.optimizer)
            parts.scaler.update()
        if isinstance(parts.scheduler, schedules.ReduceLROnPlateau):
            parts.scheduler.step(loss.item())
        elif parts.scheduler is not None:
            parts.scheduler.step()
    return rates


def state_of(parts: Parts, step: int = 0) -> State:
    return collect(parts, step=step, extras={"nominal_weight": 2.0})


def through_files(parts: Parts, step: int, folder: Path) -> State:
    run = Storage.at(str(folder))
    commit(run, write_files(run, state_of(parts, step), META))
    return load_checkpoint(run, step)[0]


def assert_resumes_exactly(build: Callable[..., Parts], folder: Path, **kwargs: Any) -> None:
    straight = build()
    rates = take(straight, range(6), **kwargs)
    final = state_sha256(state_of(straight, 6))
    for cut in (0, 3):
        first = build()
        take(first, range(cut), **kwargs)
        second = build(seed=99)
        restore(through_files(first, cut, folder), second)
        assert state_sha256(state_of(second, cut)) == state_sha256(state_of(first, cut))
        assert take(second, range(cut, 6), **kwargs) == rates[cut:]
        assert state_sha256(state_of(second, 6)) == final, f"cut at step {cut}"


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        (Adam, {}),
        (Adam, {"amsgrad": True, "fused": True}),
        (Adam, {"lr": torch.tensor(0.01), "foreach": False}),
        (SGD, {"momentum": 0.9}),
        (AdamW, {"fused": True}),
        (torch.optim.NAdam, {}),
        (torch.optim.Adafactor, {}),
        (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
        (torch.optim.Rprop, {}),
    ],
)
def test_weights_moments_and_step_counts_resume_bit_for_bit(
    optimizer: Callable[..., Optimizer], options: dict[str, Any], tmp_path: Path
) -> None:
    def build(seed: int = 0) -> Parts:
        return make(lambda params, **kw: optimizer(params, **{**kw, **options}), seed=seed)

    assert_resumes_exactly(build, tmp_path)


def test_scale_and_growth_counter_resume(tmp_path: Path) -> None:
    def build(seed: int = 0) -> Parts:
        return make(SGD, scaled=True, seed=seed, momentum=0.9)

    assert_resumes_exactly(build, tmp_path)
    parts = build()
    take(parts, range(3))
    again = build()
    restore(through_files(parts, 30, tmp_path), again)
    assert again.scaler is not None
    assert again.scaler.state_dict()["scale"] == 16.0
    assert again.scaler.state_dict()["_growth_tracker"] == 1


def _sequence(optimizer: Optimizer) -> schedules.SequentialLR:
    warmup = schedules.LinearLR(optimizer, total_iters=2)
    rest = schedules.CosineAnnealingLR(optimizer, 5)
    return schedules.SequentialLR(optimizer, [warmup, rest], [2])


class Halving:
    """A schedule function with state of its own."""

    def __init__(self) -> None:
        self.halvings = (1, 2)

    def __call__(self, step: int) -> float:
        return 0.5 ** len([h for h in self.halvings if h <= step])


SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {
    "multi-step": lambda o: schedules.MultiStepLR(o, [4]),
    "cosine": lambda o: schedules.CosineAnnealingLR(o, 6),
    "sequence": _sequence,
    "plateau": lambda o: schedules.ReduceLROnPlateau(o, patience=0, threshold=0.5),
    "one cycle": lambda o: schedules.OneCycleLR(o, 0.1, total_steps=8),
    "cyclic": lambda o: schedules.CyclicLR(o, 0.01, 0.1, step_size_up=2),
    "lambda": lambda o: schedules.LambdaLR(o, lambda step: 1 / (step + 1)),
    "callable": lambda o: schedules.LambdaLR(o, Halving()),
    "warm restarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, 2, 2),
    "chain": lambda o: schedules.ChainedScheduler(
        [schedules.ConstantLR(o, total_iters=3), schedules.ExponentialLR(o, 0.9)]
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_rate_at_every_later_step_is_the_straight_runs(name: str, tmp_path: Path) -> None:
    def build(seed: int = 0) -> Parts:
        return make(SGD, SCHEDULES[name], seed=seed, momentum=0.9)

    assert_resumes_exactly(build, tmp_path)


def test_a_schedule_built_after_the_optimizer_was_restored_goes_on_as_before(
    tmp_path: Path,
) -> None:
    straight = make(SGD, SCHEDULES["multi-step"])
    rates = take(straight, range(8))
    first = make(SGD, SCHEDULES["multi-step"])
    take(first, range(5))
    state = through_files(first, 5, tmp_path)
    second = make(SGD, SCHEDULES["multi-step"], seed=9)
    restore(state, second)
    late = Parts(
        model=second.model,
        optimizer=second.optimizer,
        scheduler=SCHEDULES["multi-step"](second.optimizer),
    )
    restore(state, late)
    assert take(late, range(5, 8)) == rates[5:]


class Eager(schedules.LambdaLR):
    """A schedule that sets a rate while it is restored."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        for group in self.optimizer.param_groups:
            group["lr"] = 7.0


def test_the_rate_is_the_saved_one_whatever_the_schedule_sets_while_restored(
    tmp_path: Path,
) -> None:
    def build(seed: int = 0) -> Parts:
        return make(SGD, lambda o: Eager(o, lambda step: 1 / (step + 1)), seed=seed)

    assert_resumes_exactly(build, tmp_path)


def test_a_state_can_be_restored_twice(tmp_path: Path) -> None:
    parts = make(SGD, SCHEDULES["multi-step"])
    take(parts, range(2))
    state = through_files(parts, 2, tmp_path)
    before = state_sha256(state)
    ends = []
    for seed in (1, 2):
        again = make(SGD, SCHEDULES["multi-step"], seed=seed)
        restore(state, again)
        take(again, range(2, 6))
        ends.append(state_sha256(state_of(again, 6)))
    assert ends[0] == ends[1]
    assert state_sha256(state) == before


def conv_net() -> nn.Module:
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3), nn.Flatten(),
        nn.Linear(16, 2),
    )  # fmt: skip
    return net.to(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("optimizer", "options"),
    [(AdamW, {"fused": True}), (AdamW, {"foreach": True}), (SGD, {"momentum": 0.9, "fused": True})],
)
def test_fused_optimizers_resume_channels_last_weights(
    optimizer: Callable[..., Optimizer], options: dict[str, Any], tmp_path: Path
) -> None:
    def build(seed: int = 0) -> Parts:
        return make(optimizer, net=conv_net, seed=seed, **options)

    assert_resumes_exactly(build, tmp_path, shape=(5, 3, 6, 6))
    state = load_checkpoint(Storage.at(str(tmp_path)), 3)[0]
    weight = state.tensors["model/0.weight"]
    moments = [t for name, t in state.tensors.items() if name.startswith("optimizer/0/")]
    assert weight.stride() == (27, 1, 9, 3)
    assert all(m.stride() == weight.stride() for m in moments if m.shape == weight.shape)
    assert all(t.data_ptr() % 16 == 0 for t in state.tensors.values())


def test_moments_laid_out_otherwise_than_their_parameter_are_refused() -> None:
    def plain() -> nn.Module:
        return conv_net().to(memory_format=torch.contiguous_format)

    parts, other = make(AdamW, net=conv_net), make(AdamW, net=plain)
    take(parts, range(1), shape=(5, 3, 6, 6))
    with pytest.raises(CheckpointError) as caught:
        restore(state_of(parts, 1), other)
    text = str(caught.value)
    assert "model/0.weight: strides (27, 1, 9, 3) in the checkpoint, (27, 9, 3, 1) in" in text
    assert "optimizer/0/exp_avg: strides (27, 1, 9, 3), but its parameter 0.weight has" in text


def test_float32_moments_of_bfloat16_weights_stay_float32(tmp_path: Path) -> None:
    def net() -> nn.Module:
        return nn.Linear(4, 4).to(torch.bfloat16)

    parts = make(SGD, net=net)
    weight = parts.model.weight
    moment = torch.full((4, 4), 1 / 3)
    parts.optimizer.state[weight]["momentum"] = moment
    again = make(SGD, net=net, seed=5)
    restore(through_files(parts, 0, tmp_path), again)
    assert torch.equal(again.optimizer.state[again.model.weight]["momentum"], moment)
    assert torch.equal(again.model.weight, weight)
    assert again.model.weight.dtype == torch.bfloat16


def test_names_carry_no_prefix_and_ties_are_stored_once() -> None:
    state = state_of(make())
    assert [name for name in state.tensors if not name.startswith("optimizer/")] == [
        "model/scale", "model/empty", "model/module.weight", "model/module.bias",
        "model/norm.weight", "model/norm.bias", "model/norm.running_mean",
        "model/norm.running_var", "model/norm.num_batches_tracked", "buffer/seen",
    ]  # fmt: skip
    assert state.values["model"]["tied"] == {"head.weight": "module.weight"}
    assert state.extras == {"nominal_weight": 2.0}


def test_tensors_are_references_to_the_live_ones() -> None:
    parts = make()
    take(parts, range(1))
    state = state_of(parts, 1)
    moment = parts.optimizer.state[parts.model.scale]["exp_avg"]
    assert state.tensors["model/scale"].data_ptr() == parts.model.scale.data_ptr()
    assert state.tensors["optimizer/0/exp_avg"].data_ptr() == moment.data_ptr()
    assert state.values["optimizer"]["state"][0]["exp_avg"] == TensorRef("optimizer/0/exp_avg")
    assert not any(tensor.requires_grad for tensor in state.tensors.values())


def test_parameters_keep_their_memory_when_restored(tmp_path: Path) -> None:
    parts, again = make(), make(seed=1)
    where = {name: p.data_ptr() for name, p in again.model.named_parameters()}
    restore(through_files(parts, 0, tmp_path), again)
    assert {name: p.data_ptr() for name, p in again.model.named_parameters()} == where
    assert again.model.head.weight is again.model.module.weight


def test_buffers_outside_the_state_dict_come_back_even_when_they_grew(tmp_path: Path) -> None:
    parts, again = make(), make()
    take(parts, range(3))
    restore(through_files(parts, 3, tmp_path), again)
    assert again.model.seen.item() == 3
    assert again.model.cache.tolist() == [2.0, 2.0, 2.0]
    assert again.model.calls == 3
    assert "cache" not in again.model.state_dict()


def test_frozen_parameters_come_back_frozen(tmp_path: Path) -> None:
    parts, again = make(), make()
    parts.model.norm.weight.requires_grad_(False)
    again.model.scale.requires_grad_(False)
    restore(through_files(parts, 0, tmp_path), again)
    assert not again.model.norm.weight.requires_grad
    assert again.model.scale.requires_grad


def test_all_mismatches_are_named_and_nothing_is_changed() -> None:
    class Other(Net):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(4, 5)
            self.scale = nn.Parameter(torch.tensor(1.0, dtype=torch.float64))
            self.more = nn.Parameter(torch.zeros(1))
            del self.norm

    parts = make(Adam, SCHEDULES["cosine"])
    other = make(SGD, net=Other, scaled=True)
    before = live_digest(dict(other.model.named_parameters()))
    with pytest.raises(CheckpointError) as caught:
        restore(state_of(parts), other)
    text = str(caught.value)
    for line in (
        "model/module.weight: shape (4, 4) in the checkpoint, (5, 4) in the model",
        "model/scale: dtype float32 in the checkpoint, float64 in the model",
        "model/more: in the model, not in the checkpoint",
        "model/norm.running_var: in the checkpoint, not in the model",
        "tied weights: the checkpoint has {'head.weight': 'module.weight'}, the model {}",
        "optimizer: Adam in the checkpoint, now SGD",
        "scheduler: CosineAnnealingLR in the checkpoint, now None",
        "gradient scaler: none in the checkpoint",
    ):
        assert line in text
    assert live_digest(dict(other.model.named_parameters())) == before


def test_parameters_in_another_order_of_the_optimizer_are_refused() -> None:
    parts, other = make(), make()
    backwards = list(reversed(list(other.model.parameters())))
    swapped = Parts(model=other.model, optimizer=Adam(backwards))
    with pytest.raises(CheckpointError, match=r"parameter 0 is scale in the checkpoint, now norm"):
        restore(state_of(parts), swapped)


def test_what_cannot_be_kept_is_refused_before_the_first_step() -> None:
    check_encodable(make(Adam, SCHEDULES["plateau"], scaled=True))

    halving = Halving()
    halving.log = math.log
    parts = make(SGD, lambda o: schedules.LambdaLR(o, halving))
    with pytest.raises(CheckpointError, match=r"scheduler\.state\.lr_lambdas\[0\]\.log: <built-in"):
        check_encodable(parts)

    parts = make()
    parts.model.register_buffer("wide", torch.zeros(1).expand(3))
    with pytest.raises(CheckpointError, match=r"model/wide: elements of this tensor share memory"):
        check_encodable(parts)

    parts = make()
    parts.model.register_buffer("sparse", torch.eye(2).to_sparse(), persistent=False)
    with pytest.raises(CheckpointError, match=r"buffer/sparse: a tensor of layout torch.sparse"):
        check_encodable(parts)

    parts = make()
    parts.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    with pytest.raises(CheckpointError, match=r"parameters number \[5\] are no parameters of the"):
        check_encodable(parts)


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("group")
def test_every_wrapper_saves_and_loads_for_every_other(tmp_path: Path) -> None:
    wrappers = {
        "bare": lambda model: model,
        "dp": DataParallel,
        "ddp": DistributedDataParallel,
        "compiled": lambda model: torch.compile(model, backend="eager"),
    }

    def wrapped(name: str, seed: int) -> Parts:
        parts = make(seed=seed)
        return Parts(model=wrappers[name](parts.model), optimizer=parts.optimizer)

    for n, saver in enumerate(wrappers):
        parts = wrapped(saver, seed=n)
        weights = state_of(make(seed=n)).tensors
        saved = through_files(parts, n, tmp_path)
        assert live_digest(saved.tensors) == live_digest(weights)
        for loader in wrappers:
            again = wrapped(loader, seed=50)
            restore(saved, again)
            assert live_digest(state_of(again).tensors) == live_digest(weights)
        plain = Net()
        plain.load_state_dict(load_weights(tmp_path), strict=True)
        assert live_digest(
            plain.state_dict(keep_vars=False) | {"_extra_state": torch.zeros(1)}
        ) == (live_digest(make(seed=n).model.state_dict() | {"_extra_state": torch.zeros(1)}))


def test_averages_come_back_and_must_be_of_the_same_kind() -> None:
    def parts(*, ema: bool, width: int = 2) -> Parts:
        model = nn.Linear(3, width)
        averages = {name: torch.randn(p.shape) for name, p in model.named_parameters()}
        optimizer = SGD(model.parameters(), lr=0.1)
        return Parts(model=model, optimizer=optimizer, ema=averages if ema else None)

    saved = parts(ema=True)
    state = collect(saved, step=1, extras={})
    other = parts(ema=True)
    restore(state, other)
    assert saved.ema is not None
    assert other.ema is not None
    assert all(torch.equal(saved.ema[name], other.ema[name]) for name in saved.ema)
    with pytest.raises(CheckpointError, match=r"average of weights \(ema\): one in the checkpoint"):
        restore(state, parts(ema=False))
    without = collect(parts(ema=False), step=1, extras={})
    with pytest.raises(CheckpointError, match=r"average of weights \(ema\): none in the checkp"):
        restore(without, parts(ema=True))
    with pytest.raises(CheckpointError, match=r"ema/weight: shape \(2, 3\) in the checkpoint"):
        restore(state, parts(ema=True, width=4))
