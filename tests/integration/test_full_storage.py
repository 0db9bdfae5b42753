"""The storage of a run fills up in the middle, and is emptied again."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from samestep import JobSpec, train
from samestep.checkpoint.committed import list_checkpoints
from samestep.checkpoint.storage import Storage
from samestep.replay.summary import summarize

MakeSpec = Callable[..., JobSpec]

# To mount a small file system takes root's rights.
pytestmark = [pytest.mark.root, pytest.mark.usefixtures("cluster"), pytest.mark.timeout(300)]

FILLS = '''
import errno
import os
from pathlib import Path

from tiny import Tiny

FIRST, LAST = 6, 14


class Fills(Tiny):
    """Whoever comes first fills the storage at one step, and makes room again at another."""

    def __init__(self, storage, **args):
        super().__init__(**args)
        self.filler = Path(storage, "filler")

    def before_step(self, model, step):
        super().before_step(model, step)
        if step == FIRST and not self.filler.exists():
            self.fill()
        if step == LAST:
            self.filler.unlink(missing_ok=True)

    def fill(self):
        with self.filler.open("ab", buffering=0) as file:
            size = 2**16
            while size:
                try:
                    file.write(bytes(size))
                except OSError as error:
                    assert error.errno == errno.ENOSPC
                    size //= 2
'''


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MB."""
    path = tmp_path / "small"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "samestep", path], check=True)
    yield path
    subprocess.run(["umount", path], check=True)


def test_training_goes_on_while_its_storage_is_full_and_nothing_is_missing_afterwards(
    make_spec: MakeSpec, folder: Path, tmp_path: Path, small: Path
) -> None:
    (tmp_path / "fills.py").write_text(FILLS)
    fields = {"epochs": 6}
    straight = train(make_spec(mode="local", **fields), name="straight", search=[folder])
    spec = make_spec(
        mode="ddp",
        workers=2,
        workload="fills:Fills",
        storage=str(small),
        # Longer than the second in which a recorder is told once.
        args={"storage": str(small), "pause_s": 0.3},
        checkpoint={"every_steps": 2, "keep": 2},
        **fields,
    )
    said: list[str] = []
    outcome = train(
        spec,
        name="full",
        search=[tmp_path, folder],
        observer=lambda status: said.extend(item["text"] for item in status["messages"]),
    )
    assert (outcome.status, outcome.digest) == ("done", straight.digest)
    run = Storage.at(outcome.run)
    found = summarize(run)
    assert (found.num_steps, found.num_redone, len(found.attempts)) == (24, 0, 1)
    [incident] = found.incidents
    assert str(incident.kind) == "storage"
    assert "No space left on device" in incident.message
    assert "free some space there, lower checkpoint.keep" in incident.message
    assert any("No space left on device" in text for text in said)
    assert [info.step for info in list_checkpoints(run)] == [22, 24]
