"""A node of a run is cut off and lives on: training goes on without it, and without its lines."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from samestep import JobSpec, parse_spec, train
from samestep.checkpoint.storage import Storage
from samestep.cluster.environment import TRAIN_ENVIRONMENT
from samestep.cluster.nodes import LocalNodes, local_nodes
from samestep.exact import numerics
from samestep.replay.summary import summarize
from samestep.telemetry.past import Attempt, read_past
from samestep.telemetry.spool import Spool

MakeSpec = Callable[..., JobSpec]
WaitUntil = Callable[[Callable[[], Any], float, str], Any]

# To make and cut links takes root's rights.
pytestmark = [pytest.mark.root, pytest.mark.timeout(400)]

GENEROUS_S = 60.0
"""Of the 3 s in which nothing is acknowledged, and what follows them, on a busy machine."""


@pytest.fixture(scope="module")
def nodes() -> Iterator[LocalNodes]:
    """A head without slots, and two nodes of one slot, whose links can be cut."""
    spec = parse_spec({"workload": "tiny:Tiny", "batch_size": 16, "epochs": 1})
    variables = {**numerics.environment(spec), **TRAIN_ENVIRONMENT}
    with local_nodes(2, linked=True, worker_env=variables) as made:
        yield made


def attempts_by_line(run: Storage) -> list[int]:
    """Which attempt each line of the ledger belongs to."""
    records = [line.record for line in Spool(run).read(10_000)]
    assert all(record.attempt is not None for record in records)
    return [record.attempt or 0 for record in records]


def test_a_node_that_is_cut_off_lives_on_and_costs_neither_a_bit_nor_a_step(
    nodes: LocalNodes, make_spec: MakeSpec, folder: Path, tmp_path: Path, wait_until: WaitUntil
) -> None:
    fields = {"epochs": 30}
    straight = train(make_spec(mode="local", **fields), name="straight", search=[folder])
    gate = tmp_path / "gate"
    gate.mkdir()
    args = {"pause_s": 0.3, "gate": str(gate)}
    spec = make_spec(
        mode="ddp", workers={"min": 1, "max": 2}, args=args, checkpoint={"every_steps": 0}, **fields
    )
    lived_on: list[bool] = []
    run = Storage.at(f"{spec.storage}/cut")

    def attempt() -> Attempt | None:
        attempts = read_past(run).attempts if run.exists("spec.yaml") else []
        return attempts[-1] if attempts else None

    def both_train() -> Attempt | None:
        now = attempt()
        at_work = now is not None and now.fields["world_size"] == 2
        return now if at_work and read_past(run).num_steps >= now.fields["start_step"] + 4 else None

    def cut() -> None:
        before = wait_until(both_train, 180, "two workers train")
        pid = int(before.fields["pids"][0])
        [node] = [node for node in nodes.nodes if node.owns(pid)]
        nodes.cut(node)
        wait_until(
            lambda: read_past(run).attempts[-1].number > before.number,
            GENEROUS_S,
            "the other goes on",
        )
        lived_on.append(psutil.pid_exists(pid))
        nodes.mend(node)
        # Time for what it still has to tell.
        num_steps = read_past(run).num_steps
        wait_until(lambda: read_past(run).num_steps >= num_steps + 20, 120, "20 steps more")
        (gate / "fast").touch()

    cutter = threading.Thread(target=cut)
    cutter.start()
    outcome = train(spec, name="cut", search=[folder])
    cutter.join()
    assert lived_on == [True]
    assert (outcome.status, outcome.digest) == ("done", straight.digest)
    found = summarize(run)
    assert found.num_redone == 0
    recovery = next(one for one in found.recoveries if not one["planned"])
    assert recovery["workers"] == [2, 1]
    assert 0 < recovery["again_s"] < GENEROUS_S
    # Nothing of the attempt before once another has begun, though it can be reached again.
    lines = attempts_by_line(run)
    assert lines == sorted(lines)
