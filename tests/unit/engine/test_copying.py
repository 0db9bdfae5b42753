"""The state copied while the next step is computed: never one tensor of the next state."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from attempts import started
from pool import spec_of
from torch import nn

from samestep.checkpoint.image import Image
from samestep.checkpoint.marks import Marks
from samestep.checkpoint.reading import load_checkpoint
from samestep.checkpoint.state import Parts, collect
from samestep.checkpoint.storage import Storage
from samestep.checkpoint.writing import Outline
from samestep.engine.copying import ASIDE_BYTES, GIVEN_UP, Copying
from samestep.errors import CheckpointError

WAIT_S = 120.0
LARGE_BUFFER = ASIDE_BYTES // 4 + 1


def digests_of(kind: str, folder: Path, **args: Any) -> list[str]:
    checkpoint = {"every_steps": 1, "keep": 9}
    spec = spec_of(
        f"slow_cases:{kind}",
        batch_size=6,
        shards=3,
        max_steps=4,
        checkpoint=checkpoint,
        ema={"decay": 0.9},
        mode="local",
        storage=str(folder),
        args=args,
    )
    with started(spec) as process:
        output, _ = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, output
    run = Storage.at(str(folder / "run"))
    found = [load_checkpoint(run, step)[1].digest for step in range(1, 5)]
    assert output.decode().split()[-1] == found[-1]
    return found


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("kind", "width"), [("Slow", 9), ("SlowBefore", 9), ("Slow", LARGE_BUFFER)]
)
def test_what_is_saved_is_the_state_of_its_step_however_long_the_copy_takes(
    tmp_path: Path, kind: str, width: int
) -> None:
    quick = digests_of(kind, tmp_path / "quick", slow=False, width=width)
    assert digests_of(kind, tmp_path / "slow", slow=True, width=width) == quick
    assert len(set(quick)) == 4


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


def test_a_copy_is_given_up() -> None:
    given_up = threading.Event()
    given_up.set()
    with pytest.raises(CheckpointError, match=GIVEN_UP):
        copying_of(Net()).run(given_up)


def test_a_copy_waits_for_those_of_the_other_workers_of_the_node(tmp_path: Path) -> None:
    first, second = (Marks(tmp_path / "marks", 2) for _ in range(2))
    mine = copying_of(Net(), number=3, marks=first)
    given_up = threading.Event()
    mine.run(given_up)
    second.set(1, 2)  # that of the save before
    thread = threading.Thread(target=mine.wait_for_others, args=(given_up,), daemon=True)
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    second.set(1, 3)
    thread.join(WAIT_S)
    assert not thread.is_alive()
    second.set(1, 2)
    given_up.set()
    with pytest.raises(CheckpointError, match=GIVEN_UP):
        mine.wait_for_others(given_up)
