"""The traps that broke an engine that looked right; each test fails when its cure is taken out.

The matrix holds most of them too, but does not say which one it was.
"""

from __future__ import annotations

import gc
import math
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from attempts import Run, Train
from cases import Base, Rows
from noting import Noting, noted
from pool import spec_of
from torch import Tensor, nn
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR

from samestep import JobSpec, parse_spec
from samestep.checkpoint.state import Parts
from samestep.engine.batch import to_device
from samestep.engine.buckets import Buckets, layout_buckets, trainable
from samestep.engine.buffers import BufferKeeper
from samestep.engine.exchange import OneProcess
from samestep.engine.feed import Feed, Fetcher
from samestep.engine.peers import Peers
from samestep.engine.setup import build, make_replicas
from samestep.engine.shard import forward_shard
from samestep.engine.step import StepEngine
from samestep.engine.update import apply_update, global_norm, make_scaler
from samestep.exact.numerics import GlobalsKept, pin
from samestep.exact.order import Order, ShardPlan
from samestep.exact.seeds import global_generators_kept
from samestep.exact.tree import local_plan

Results = Callable[..., list[Any]]
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def kept() -> Iterator[None]:
    with GlobalsKept(), global_generators_kept():
        torch.manual_seed(0)
        yield


def make_spec(**fields: Any) -> JobSpec:
    return parse_spec({"workload": "m:C", "batch_size": 4, "max_steps": 9, **fields})


def make_buckets(
    model: nn.Module,
    shards: int = 1,
    *,
    on_complete: Callable[[int], None] = lambda _: None,
    reduce_dtype: torch.dtype | None = None,
) -> Buckets:
    parameters = trainable(model)
    layouts = layout_buckets(parameters, world_size=1, reduce_dtype=reduce_dtype)
    plan = local_plan(range(shards), pairs_in_place=reduce_dtype is None)
    return Buckets(parameters, layouts, plan, on_complete)


def reduce(buckets: Buckets, losses: list[Tensor | None], divisor: float = 1.0) -> list[Any]:
    """One step over shards with these losses; an absent one has none."""
    exchange = OneProcess([buckets], len(losses))
    buckets.start_step()
    for loss in losses:
        buckets.start_shard()
        if loss is not None:
            buckets.backward(loss)
        buckets.end_shard()
    buckets.flush()
    exchange.complete(divisor)
    return buckets.publish()


@pytest.mark.parametrize("present", [(True,), (True, False), (False, True, False), (True, True)])
def test_a_gradient_of_minus_zero_stays_minus_zero(present: tuple[bool, ...]) -> None:
    weight = nn.Linear(3, 1, bias=False)
    losses = [(weight.weight * -0.0).sum() if here else None for here in present]
    [parameter] = reduce(make_buckets(weight, len(present)), losses)
    assert torch.signbit(parameter.grad).all()
    assert (parameter.grad == 0).all()


def test_a_stale_sum_of_the_step_before_is_gone_in_the_next() -> None:
    model = nn.ModuleList([nn.Linear(2, 1, bias=False), nn.Linear(2, 1, bias=False)])
    buckets = make_buckets(model, 3)
    one, two = model[0].weight, model[1].weight
    reduce(buckets, [one.sum() * 5 + two.sum() * 7] * 1 + [two.sum() * 3, one.sum()])
    reduce(buckets, [None, one.sum() * 2, None])
    assert two.grad is None
    assert one.grad.tolist() == [[2.0, 2.0]]


def test_gradients_lie_as_their_parameters_do_and_at_64_bytes() -> None:
    net = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Conv2d(5, 3, 3)).to(
        memory_format=torch.channels_last
    )
    having = reduce(make_buckets(net), [net(torch.randn(2, 3, 8, 8)).sum()])
    assert len(having) == 4
    for parameter in having:
        assert parameter.grad.stride() == parameter.stride()
        assert parameter.grad.data_ptr() % 64 == 0


def test_the_sum_is_divided_and_not_multiplied_by_the_reciprocal() -> None:
    model = nn.Linear(1000, 1, bias=False)
    x = torch.randn(1000)
    reduce(make_buckets(model), [(model.weight * x).sum()], divisor=10 / 3)
    divisor = torch.full_like(x, 10 / 3)
    assert torch.equal(model.weight.grad[0], x / divisor)
    assert not torch.equal(model.weight.grad[0], x * (1 / divisor))


def test_a_parameter_that_no_shard_used_has_no_gradient_and_one_with_zeros_has() -> None:
    model = nn.ModuleList([nn.Linear(2, 1, bias=False) for _ in range(3)])
    buckets = make_buckets(model, 2)
    having = reduce(buckets, [model[0].weight.sum(), (model[1].weight * 0).sum()])
    assert having == [model[0].weight, model[1].weight]
    assert model[1].weight.grad.tolist() == [[0.0, 0.0]]
    assert model[2].weight.grad is None


def test_a_bucket_goes_out_in_backward_though_another_holds_an_unused_parameter() -> None:
    model = nn.ModuleList([nn.Linear(1024, size, bias=False) for size in (300, 7000, 10, 9)])
    sent: list[int] = []
    buckets = make_buckets(model, on_complete=sent.append)
    assert [len(layout.parameters) for layout in buckets.layouts] == [2, 1, 1]
    buckets.start_step()
    buckets.start_shard()
    buckets.backward(sum((model[i].weight.sum() for i in (0, 1, 2)), torch.zeros(())))
    assert sent == [1]
    buckets.flush()
    assert sorted(sent) == [0, 1, 2]


def test_only_the_last_shard_sends_buckets() -> None:
    model = nn.ModuleList([nn.Linear(1024, size, bias=False) for size in (300, 7000, 9)])
    sent: list[int] = []
    buckets = make_buckets(model, 2, on_complete=sent.append)
    reduce(buckets, [sum((part.weight.sum() for part in model), torch.zeros(())), None])
    assert sorted(sent) == list(range(len(buckets.layouts)))
    buckets.start_step()
    buckets.start_shard()
    sent.clear()
    buckets.backward(sum((part.weight.sum() for part in model), torch.zeros(())))
    assert sent == []


def test_converted_leaves_are_rounded_once_after_the_whole_sum() -> None:
    model = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    losses = [(model.weight.float() * value).sum() for value in (256.0, 1.0, 1.0, 1.0)]
    [parameter] = reduce(make_buckets(model, 4, reduce_dtype=torch.float32), losses)
    assert parameter.grad.dtype == torch.bfloat16
    assert parameter.grad.item() == 260.0  # 259 rounded; in bfloat16 256 + 1 stays 256


def test_the_norm_is_taken_by_parameter() -> None:
    gradients = [torch.randn(1000) * 10**power for power in range(-3, 3)]
    expected = torch.linalg.vector_norm(torch.stack([g.norm() for g in gradients]))
    flat = torch.cat(gradients).norm()
    assert global_norm(gradients).item() == expected.item()
    assert global_norm(gradients).item() != flat.item()


class Watching(Rows):
    """Notes with how many threads it is read; draws a number."""

    def __init__(self) -> None:
        super().__init__(9, (2,))
        self.threads: list[int] = []

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.threads.append(torch.get_num_threads())
        return torch.rand(2), self.y[index]

    def __getitems__(self, indices: list[int]) -> Any:
        raise AssertionError("goes round the seeds of the items")


def plan_of(*ids: int, start: int = 0) -> ShardPlan:
    positions = range(start, start + len(ids))
    return ShardPlan(step=0, epoch=0, shard=0, positions=positions, ids=ids)


def test_items_and_collate_run_under_one_thread_whatever_the_job_has() -> None:
    pin(make_spec(threads=2))
    rows = Watching()

    class Collating(Base):
        def collate(self, samples: list[Any]) -> Any:
            rows.threads.append(torch.get_num_threads())
            return super().collate(samples)

    assert Fetcher(Collating(), rows, 0)[plan_of(1, 2)].error is None
    assert rows.threads == [1, 1, 1]
    assert torch.get_num_threads() == 2


def test_transforms_are_keyed_by_position_and_not_by_sample() -> None:
    fetcher = Fetcher(Base(), Watching(), 0)
    x, _ = fetcher[plan_of(5, 5, 3)].batch
    assert not torch.equal(x[0], x[1])
    again, _ = fetcher[plan_of(5, start=1)].batch
    assert torch.equal(again[0], x[1])


class Inherited:
    """Garbage of the process that made it; notes where it is destroyed."""

    def __init__(self, note: Path) -> None:
        self.note, self.pid, self.me = note, os.getpid(), self

    def __del__(self) -> None:
        if os.getpid() != self.pid:
            self.note.touch()


class Collecting(Rows):
    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        gc.collect()
        return super().__getitem__(index)


def test_loader_processes_do_not_destroy_what_they_inherited(tmp_path: Path) -> None:
    order = Order(dataset_size=4, batch_size=4, shards=1, drop_last=False, seed=0)
    gc.disable()
    try:
        Inherited(tmp_path / "destroyed elsewhere")
        feed = Feed(
            workload=Base(), dataset=Collecting(4, (2,)), order=order, turns=[0], seed=0,
            start_step=0, end_step=1, loader_processes=1, pin_memory=False,
        )  # fmt: skip
        x, _ = feed.take(order.shards_of(0)[0], CPU)
        feed.close()
    finally:
        gc.enable()
    assert x.shape == (4, 2)
    assert list(tmp_path.iterdir()) == []


class Settings(Rows):
    """Each sample tells under which settings it was read."""

    def __getitem__(self, index: int) -> Tensor:
        flags = [
            torch.get_num_threads(),
            torch.are_deterministic_algorithms_enabled(),
            torch.get_default_dtype() == torch.float64,
        ]
        return torch.tensor([int(flag) for flag in flags])


@pytest.mark.parametrize("loader_processes", [0, 1])
def test_samples_are_read_under_the_same_settings_in_loader_processes(
    loader_processes: int,
) -> None:
    pin(make_spec(threads=2))
    order = Order(dataset_size=4, batch_size=4, shards=1, drop_last=False, seed=0)
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        feed = Feed(
            workload=Base(), dataset=Settings(4, (2,)), order=order, turns=[0], seed=0,
            start_step=0, end_step=1, loader_processes=loader_processes, pin_memory=False,
        )  # fmt: skip
        read = feed.take(order.shards_of(0)[0], CPU)
        feed.close()
    finally:
        torch.set_default_dtype(dtype)
    assert read.tolist() == [[1, 1, 1]] * 4


WORKER = """
import os, socket, sys, threading, torch
sys.path[:0] = sys.argv[2:]
from cases import Base, Rows
from samestep.engine.feed import Feed
from samestep.exact.order import Order
connection = socket.socket(socket.AF_UNIX)
connection.connect(sys.argv[1])

class Hanging(Rows):
    def __getitem__(self, index):
        connection.sendall(f"{os.getppid()} {os.getpid()}\\n".encode())
        threading.Event().wait(3600)

order = Order(dataset_size=4, batch_size=4, shards=1, drop_last=False, seed=0)
feed = Feed(
    workload=Base(), dataset=Hanging(4, (2,)), order=order, turns=[0], seed=0,
    start_step=0, end_step=1, loader_processes=1, pin_memory=False,
)
feed.take(order.shards_of(0)[0], torch.device("cpu"))
"""


def test_what_a_killed_worker_was_connected_to_sees_it_although_a_loader_process_hangs(
    tmp_path: Path,
) -> None:
    address, loader = str(tmp_path / "socket"), 0
    with socket.socket(socket.AF_UNIX) as listener:
        listener.settimeout(60.0)
        listener.bind(address)
        listener.listen()
        command = [sys.executable, "-c", WORKER, address, str(Path(__file__).parent), *sys.path]
        with subprocess.Popen(command) as worker:
            try:
                connection, _ = listener.accept()
                with connection:
                    connection.settimeout(30.0)
                    parent, loader = map(int, connection.recv(100).split())
                    assert parent == worker.pid
                    worker.kill()
                    assert connection.recv(1) == b""
            finally:
                worker.kill()
                if loader:
                    with suppress(ProcessLookupError):
                        os.kill(loader, signal.SIGKILL)


@pytest.mark.parametrize("offset", [1, 2, 3, 5])
def test_tensors_at_odd_addresses_are_moved_to_an_even_one(offset: int) -> None:
    room = torch.arange(64.0)
    batch = {"x": room[offset : offset + 8], "name": "kept"}
    moved = to_device(batch, CPU)
    assert moved["x"].data_ptr() % 64 == 0
    assert torch.equal(moved["x"], batch["x"])
    assert moved["name"] == "kept"
    assert to_device(moved, CPU)["x"] is moved["x"]


def test_each_shard_has_an_autocast_context_of_its_own() -> None:
    model = nn.Linear(4, 1)
    x = torch.randn(3, 4)

    def loss() -> float:
        result = forward_shard(
            make_spec(precision="bf16"), Base(), lambda b: model(b).float().mean(), x,
            step=0, shard=0, num_samples=3, device=CPU,
        )  # fmt: skip
        return result.loss_value

    first = loss()
    with torch.no_grad():
        model.weight.mul_(2)
        model.bias.mul_(2)
    assert loss() == 2 * first  # a cached cast would give the old weights


def test_a_shard_starts_from_the_buffers_before_the_step_and_the_first_ones_are_kept() -> None:
    model = nn.BatchNorm1d(2)
    keeper = BufferKeeper(model)
    means = []
    keeper.start_step()
    for shard in range(3):
        keeper.start_shard()
        model(torch.full((2, 2), float(shard + 1)) + torch.tensor([[0.0], [0.5]]))
        means.append(model.running_mean.clone())
        if shard == 1:  # the first with weight
            keeper.keep()
    keeper.end_step(Peers(None), 0)
    assert torch.equal(model.running_mean, means[1])
    assert int(model.num_batches_tracked) == 1
    assert [round(mean[0].item(), 4) for mean in means] == [0.125, 0.225, 0.325]


def test_a_forward_that_assigns_a_buffer_has_its_value_kept_in_the_tensor_that_was_there() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

    model = Counter()
    registered = model.count
    keeper = BufferKeeper(model)
    keeper.start_step()
    keeper.start_shard()
    model.count = model.count + 3
    keeper.keep()
    keeper.end_step(Peers(None), 0)
    assert model.count is registered
    assert model.count.item() == 3


def make_parts(**fields: Any) -> tuple[JobSpec, Parts]:
    spec = make_spec(**fields)
    model = nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), lr=1.0, momentum=0.9, weight_decay=0.1)
    return spec, Parts(
        model=model,
        optimizer=optimizer,
        scheduler=StepLR(optimizer, 1, gamma=0.5),
        scaler=make_scaler(spec, CPU),
    )


def test_an_overflow_leaves_weights_alone_halves_the_scale_and_moves_the_schedule() -> None:
    spec, parts = make_parts(precision="fp16", scaler={"init_scale": 8.0})
    before = parts.model.weight.clone()
    for parameter in parts.model.parameters():
        parameter.grad = torch.full_like(parameter, math.inf)
    updated = apply_update(spec, parts, list(parts.model.parameters()), step=0, device=CPU)
    assert updated.skipped
    assert torch.equal(parts.model.weight, before)
    assert parts.scaler is not None
    assert parts.scaler.get_scale() == 4.0
    assert updated.learning_rates == [1.0]
    assert parts.optimizer.param_groups[0]["lr"] == 0.5


def test_a_step_without_weight_moves_the_schedule_only() -> None:
    spec, parts = make_parts()
    before = parts.model.weight.clone()
    updated = apply_update(spec, parts, [], step=0, device=CPU)
    assert updated.skipped
    assert math.isnan(updated.grad_norm)
    assert torch.equal(parts.model.weight, before)
    assert parts.optimizer.state_dict()["state"] == {}
    assert parts.optimizer.param_groups[0]["lr"] == 0.5


def test_the_graph_of_a_tied_weight_gives_one_gradient() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    x = torch.randn(2, 3)
    [expected] = torch.autograd.grad(model(x).square().mean(), [model[0].weight])
    [parameter] = reduce(make_buckets(model), [F.mse_loss(model(x), torch.zeros(2, 3))])
    assert torch.equal(parameter.grad, expected)


def test_a_worker_whose_shards_are_all_empty_runs_no_user_code_in_that_step(
    results: Results, tmp_path: Path
) -> None:
    # Two steps an epoch, of eight samples and of one: that is all in shard 0, of worker 0.
    spec = spec_of("noting:Noting", args={"folder": str(tmp_path), "size": 9}, batch_size=8)
    results("engine", 3, spec=spec, num_steps=4)
    calls = ["before_step", "item", "collate", "loss", "backward"]
    assert noted(tmp_path, 0, 1) == noted(tmp_path, 0, 3) == calls
    for rank in (1, 2):
        assert noted(tmp_path, rank, 1) == noted(tmp_path, rank, 3) == ["before_step"]
        assert set(noted(tmp_path, rank, 2)) == set(calls)


class Telling(Peers):
    """Alone; notes when the small talk of a step starts."""

    def __init__(self, workload: Noting) -> None:
        super().__init__(None)
        self.workload = workload

    def gather(self, message: Any) -> Callable[[], list[Any]]:
        self.workload.note("talk")
        return super().gather(message)


def test_the_small_talk_of_a_step_is_one_message_after_the_last_forward(tmp_path: Path) -> None:
    spec = make_spec(batch_size=8, shards=2)
    workload = Noting(folder=str(tmp_path), size=8)
    peers = Telling(workload)
    built = build(spec, workload, CPU)
    replicas = make_replicas(spec, built, [CPU], peers)
    engine = StepEngine(spec=spec, workload=workload, replicas=replicas, peers=peers, group=None)
    fetcher = Fetcher(workload, built.dataset, 0)
    engine.compute(0, built.order.shards_of(0), lambda plan, _: fetcher[plan].batch, 0)
    engine.close()
    calls = [what for what in noted(tmp_path, 0, -1) if what not in ("item", "collate")]
    assert calls == ["loss", "backward", "loss", "talk", "backward"]


def test_an_attempt_computes_with_its_number_of_threads_in_whichever_thread_it_runs(
    results: Results, train: Train, tmp_path: Path
) -> None:
    spec = spec_of("Conv", threads=2, max_steps=3)
    folder = tmp_path / "apart"
    run = Run(folder, results("attempt_in_a_thread", spec=spec, run=str(folder)))
    assert run.digest == train(spec, "here").digest


def test_the_nominal_weight_is_that_of_the_runs_first_shard_after_a_resume_too(
    train: Train,
) -> None:
    spec = spec_of("feature_cases:Weighing", max_steps=4)
    straight = train(spec, "straight")
    train({**spec, "max_steps": 2}, "stopped", 2)
    assert train(spec, "stopped", 3).digest == straight.digest
