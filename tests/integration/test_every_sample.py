"""Every sample is trained once in every epoch, also where workers die between two checkpoints."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import pytest

from samestep import JobSpec, Outcome, train
from samestep.checkpoint.storage import Storage
from samestep.exact.digest import ids_digest
from samestep.exact.order import Order
from samestep.names import Event
from samestep.replay.summary import summarize
from samestep.telemetry.ledger import read_ledger
from samestep.telemetry.records import STEP, StepRecord

MakeSpec = Callable[..., JobSpec]

pytestmark = [pytest.mark.usefixtures("cluster"), pytest.mark.timeout(400)]

NUM_SAMPLES = 40
NUM_EPOCHS = 3
FIELDS = {
    "workload": "counted:Counted",
    "batch_size": 8,
    "epochs": NUM_EPOCHS,
    "checkpoint": {"every_steps": 2, "snapshot_every": 0},
}

WORKLOAD = '''
import os
import signal
import threading
from pathlib import Path

from samestep.checkpoint.storage import Storage
from samestep.telemetry.past import read_past
from tiny import Data, Tiny


class Numbered(Data):
    """40 samples that carry their numbers."""

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return *super().__getitem__(index), index


class Counted(Tiny):
    """Notes which samples the loss of each step saw; dies at one where a file says so."""

    def __init__(self, seen=None, killed_at=None):
        super().__init__()
        self.seen, self.killed_at = seen, killed_at

    def data(self):
        return Numbered()

    def before_step(self, model, step):
        super().before_step(model, step)
        if step == self.killed_at:
            self.meet()
            for path in Path(self.seen).glob("dies-*"):
                try:
                    path.rename(Path(self.seen, f"met-{path.name}"))
                except FileNotFoundError:
                    continue
                os.kill(os.getpid(), signal.SIGKILL)

    def meet(self):
        """Waits until the steps before are over for both workers, and in the ledger."""
        Path(self.seen, f"at-{os.getpid()}").touch()
        run = Storage.at(str(Path(self.seen).parent / "runs" / "struck"))
        for _ in range(600):
            both = len(list(Path(self.seen).glob("at-*"))) > 1
            if both and read_past(run).num_steps >= self.step:
                return
            threading.Event().wait(0.1)

    def loss(self, model, batch):
        *batch, numbers = batch
        if self.seen is not None and self.step is not None:
            with open(Path(self.seen, f"seen-{os.getpid()}"), "a") as file:
                file.write(" ".join(map(str, [self.step, *numbers.tolist()])) + "\\n")
        return super().loss(model, batch)
'''


@pytest.fixture(scope="module")
def counted(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Folders with the workload `counted`, and with the one that it is made of."""
    path = tmp_path_factory.mktemp("counted")
    (path / "counted.py").write_text(WORKLOAD)
    return [path, folder]


@pytest.fixture
def undisturbed(make_spec: MakeSpec, counted: list[Path]) -> Outcome:
    return train(make_spec(mode="local", **FIELDS), name="undisturbed", search=counted)


def test_every_sample_is_trained_once_in_every_epoch_though_workers_are_killed(
    make_spec: MakeSpec,
    counted: list[Path],
    tmp_path: Path,
    undisturbed: Outcome,
) -> None:
    num_killed, killed_at = 2, 5  # all of them: a checkpoint has the state
    seen = tmp_path / "seen"
    seen.mkdir()
    for number in range(num_killed):
        (seen / f"dies-{number}").touch()
    spec = make_spec(
        mode="ddp",
        workers=2,
        loader_processes=2,
        args={"seen": str(seen), "killed_at": killed_at},
        **FIELDS,
    )
    outcome = train(spec, name="struck", search=counted)
    run = Storage.at(outcome.run)
    assert len(list(seen.glob("met-*"))) == num_killed
    assert (outcome.status, outcome.digest) == ("done", undisturbed.digest)

    planned = check_ledger(run, spec)
    summary = summarize(run)
    begun = attempts_begun(run)
    # Of two that die at once Ray may tell of the first alone.
    assert {str(incident.kind) for incident in summary.incidents} == {"crash"}
    told = [incident.message for incident in summary.incidents]
    assert len(told) <= num_killed, told
    assert [attempt.start_step for attempt in summary.attempts] == [start for start, _ in begun]
    due = [known - start for start, known in begun]
    redone = [attempt.num_redone for attempt in summary.attempts]
    assert (redone[0], redone[-1], summary.num_redone) == (0, due[-1], sum(redone))
    assert summary.num_redone in (
        1,
        3,
    )  # it was written after 4 steps, or 2 where that was not over

    # The ledger tells what was to be trained; the losses tell what was. Each worker begins an
    # attempt with the first shard of all, the canary, which leaves no trace.
    starts = [start for start, _ in begun]
    trained = samples_seen(seen)
    assert trained.keys() == set(range(len(planned)))
    for step, shards in enumerate(planned):
        expected = [*chain(*shards), *(planned[0][0] * 2 if step in starts else [])]
        found = trained[step]
        if min(starts[1:]) <= step <= killed_at:  # begun by both attempts
            found, expected = list(set(found)), list(set(expected))
        assert sorted(found) == sorted(expected), step


def check_ledger(run: Storage, spec: JobSpec) -> list[list[list[int]]]:
    """Finds each step once, with the samples of the order; gives those by step and shard."""
    order = Order(
        dataset_size=NUM_SAMPLES,
        batch_size=spec.batch_size,
        shards=spec.shards,
        drop_last=spec.drop_last,
        seed=spec.seed,
    )
    records = [StepRecord.from_json(line) for line in read_ledger(run) if line["type"] == STEP]
    num_steps = order.steps_per_epoch
    assert [record.step for record in records] == list(range(NUM_EPOCHS * num_steps))
    planned = [order.step_ids(record.step) for record in records]
    assert [record.ids for record in records] == [ids_digest(shards) for shards in planned]
    for epoch in range(NUM_EPOCHS):
        of_epoch = chain(*planned[epoch * num_steps : (epoch + 1) * num_steps])
        assert sorted(chain(*of_epoch)) == list(range(NUM_SAMPLES))
    return planned


def attempts_begun(run: Storage) -> list[tuple[int, int]]:
    """Of each attempt the first step, and how many steps the ledger held when it began."""
    found, known = [], 0
    for line in read_ledger(run):
        if line["type"] == STEP:
            known = max(known, line["step"] + 1)
        elif line["event"] == Event.ATTEMPT_STARTED:
            found.append((int(line["step"]), known))
    return found


def samples_seen(folder: Path) -> dict[int, list[int]]:
    """The samples that losses were computed of, by step, in any order."""
    found: dict[int, list[int]] = defaultdict(list)
    for path in folder.glob("seen-*"):
        for line in path.read_text().splitlines():
            step, *numbers = map(int, line.split())
            found[step] += numbers
    return found
