"""The state copied while the next step is computed: never one tensor of the next state."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from attempts import Started, Train
from pool import spec_of
from torch import nn

from samestep.checkpoint.image import Image
from samestep.checkpoint.marks import GIVEN_UP, Marks
from samestep.checkpoint.reading import digest_of, load_checkpoint
from samestep.checkpoint.state import Parts, collect
from samestep.checkpoint.storage import Storage
from samestep.checkpoint.writing import Outline
from samestep.engine.copying import ASIDE_BYTES, Copying
from samestep.errors import CheckpointError

WAIT_S = 120.0
LARGE_BUFFER = ASIDE_BYTES // 4 + 1


def spec(kind: str, folder: Path, **args: Any) -> dict[str, Any]:
    return spec_of(
        f"slow_cases:{kind}",
        batch_size=6,
        shards=3,
        max_steps=4,
        checkpoint={"every_steps": 1, "keep": 9},
        ema={"decay": 0.9},
        mode="local",
        storage=str(folder),
        args=args,
    )


def saved(run: Path) -> list[str]:
    """Of each step, the digest of what the files hold; that in the manifest must be the same."""
    folders = [run / f"checkpoints/step-{step:08d}" for step in range(1, 5)]
    found = [digest_of(folder) for folder in folders]
    assert found == [load_checkpoint(Storage.at(str(run)), step)[1].digest for step in range(1, 5)]
    return found


def alone(kind: str, folder: Path, **args: Any) -> list[str]:
    with Started(spec(kind, folder, **args)) as process:
        digest = process.digest()
    found = saved(folder / "run")
    assert digest == found[-1]
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kind", "width", "overlaps"),
    [("Slow", 9, True), ("SlowBefore", 9, False), ("Slow", LARGE_BUFFER, False)],
)
def test_what_is_saved_is_the_state_of_its_step_however_long_the_copy_takes(
    tmp_path: Path, kind: str, width: int, overlaps: bool
) -> None:
    quick = alone(kind, tmp_path / "quick", slow=None, width=width)
    mark = tmp_path / "overlaps"
    assert alone(kind, tmp_path / "slow", slow=0, width=width, overlaps=str(mark)) == quick
    assert len(set(quick)) == 4
    assert mark.exists() == overlaps  # else training waits for the copy


@pytest.mark.timeout(300)
def test_a_worker_whose_copy_is_late_is_waited_for_by_those_who_write(
    train: Train, tmp_path: Path
) -> None:
    quick = alone("Slow", tmp_path / "quick", slow=None)
    for rank in range(2):
        run = train(spec("Slow", tmp_path, slow=rank), f"slow-{rank}", 2)
        assert run.digest == quick[-1]
        assert saved(run.folder) == quick


class Net(nn.Module):
    """Two parameters, and two buffers that share a storage."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(300, 20))
        self.other = nn.Parameter(torch.randn(500))
        self.register_buffer("seen", torch.zeros(8))
        self.register_buffer("part", self.seen[2:5], persistent=False)


def copying_of(net: nn.Module, **fields: Any) -> Copying:
    parts = Parts(model=net, optimizer=torch.optim.SGD(net.parameters(), lr=0.1))
    outline = Outline.of(collect(parts, step=3, extras={"windows": torch.arange(4)}), num_parts=2)
    given = {
        "outline": outline,
        "image": Image.private(outline.plan.num_bytes),
        "pieces": outline.parts[0],
        "compared": [],
        "number": 1,
        "local_rank": 0,
        "marks": None,
    }
    return Copying(**{**given, **fields}).begin(net)


def test_a_forward_may_change_buffers_meanwhile_and_nothing_else() -> None:
    net = Net()
    copying = copying_of(net)
    both = [piece for part in copying.outline.parts for piece in part]
    before = [copying.outline.digest_of(part) for part in range(2)]
    net.seen.data.add_(1.0)  # as BatchNorm does it: no count of changes moves
    again = copying_of(net, compared=[0, 1], pieces=both)
    assert before == [copying.outline.digest_of(part) for part in range(2)]
    digests = again.run(threading.Event())
    assert digests == {n: again.outline.digest_of(n, again.image) for n in range(2)}
    assert [digests[n] == before[n] for n in range(2)].count(False) == 1  # that with the buffers
    copying = copying_of(net)
    with torch.no_grad():
        net.weight.mul_(2.0)
    with pytest.raises(CheckpointError, match="model/weight changed before the update"):
        copying.run(threading.Event())


def test_large_buffers_are_not_copied_twice() -> None:
    net = Net()
    net.register_buffer("table", torch.zeros(LARGE_BUFFER))
    copying = copying_of(net)
    assert not copying.is_behind
    assert isinstance(net.table, torch.Tensor)
    assert copying.outline.tensors["model/table"].data_ptr() == net.table.data_ptr()
    assert copying_of(Net()).is_behind


class Counting(Net):
    """Keeps a tensor in its extra state, and counts in it."""

    def __init__(self) -> None:
        super().__init__()
        self.count = torch.zeros(2)

    def get_extra_state(self) -> torch.Tensor:
        return self.count

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.count = state


def test_extra_state_is_copied_at_once() -> None:
    net = Counting()
    copying = copying_of(net)
    net.count += 1
    assert copying.outline.tensors["model/_extra_state"].tolist() == [0.0, 0.0]
    copying.run(threading.Event())


def test_a_copy_is_given_up_and_the_other_workers_of_the_node_learn_of_it(tmp_path: Path) -> None:
    first, second = (Marks(tmp_path / "marks", 2) for _ in range(2))
    given_up, nobody = threading.Event(), threading.Event()
    given_up.set()
    with pytest.raises(CheckpointError, match=GIVEN_UP):
        copying_of(Net(), marks=first, number=3).run(given_up)
    other = copying_of(Net(), marks=second, number=3, local_rank=1)
    other.run(nobody)
    with pytest.raises(CheckpointError, match="the copy of worker 0 of this node failed"):
        other.wait_for_others(nobody)


def test_a_copy_waits_for_those_of_the_other_workers_of_the_node(tmp_path: Path) -> None:
    first, second = (Marks(tmp_path / "marks", 2) for _ in range(2))
    mine = copying_of(Net(), number=3, marks=first)
    given_up = threading.Event()
    mine.run(given_up)
    second.set(1, 2, failed=True)  # that of the save before
    thread = threading.Thread(target=mine.wait_for_others, args=(given_up,), daemon=True)
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    second.set(1, 3)
    thread.join(WAIT_S)
    assert not thread.is_alive()
    given_up.set()
    with pytest.raises(CheckpointError, match=GIVEN_UP):
        mine.wait_for_others(given_up)
