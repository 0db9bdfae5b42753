"""Ray's memory monitor ends a worker of a node that is shown less memory than the machine has."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from samestep import JobSpec, parse_spec, train
from samestep.checkpoint.storage import Storage
from samestep.cluster.environment import TRAIN_ENVIRONMENT
from samestep.cluster.nodes import LocalNodes, local_nodes, num_alive
from samestep.exact import numerics
from samestep.replay.summary import summarize
from samestep.telemetry.past import read_past

MakeSpec = Callable[..., JobSpec]
WaitUntil = Callable[[Callable[[], Any], float, str], Any]

# To show a node other files of the kernel takes root's rights.
pytestmark = [pytest.mark.root, pytest.mark.timeout(400)]

GIB = 2**30
MONITOR = {"RAY_memory_usage_threshold": "0.9", "RAY_memory_monitor_refresh_ms": "100"}


class PretendedMemory:
    """A folder that stands for the kernel's files of a node that has 4 GiB."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()
        self.begin = (
            *("unshare", "--mount", "--", "sh", "-c"),
            *('mount --bind "$1" /sys/fs/cgroup && shift && exec "$@"', "sh", str(folder)),
        )
        self._write("memory.max", str(4 * GIB))
        self._write("memory.stat", "anon 0\ninactive_file 0\nactive_file 0\n")
        self.use(1.0)

    def use(self, num_gib: float) -> None:
        self._write("memory.current", str(int(num_gib * GIB)))

    def _write(self, name: str, text: str) -> None:
        new = self._folder / f"{name}.new"
        new.write_text(f"{text}\n")
        new.rename(self._folder / name)


@pytest.fixture(scope="module")
def nodes() -> Iterator[LocalNodes]:
    """A head without slots, and two nodes of one slot; this process is a driver on the head."""
    spec = parse_spec({"workload": "tiny:Tiny", "batch_size": 16, "epochs": 1})
    variables = {**numerics.environment(spec), **TRAIN_ENVIRONMENT}
    with local_nodes(2, worker_env=variables) as made:
        yield made


def test_a_worker_that_rays_memory_monitor_ends_is_told_as_lack_of_memory(
    nodes: LocalNodes, make_spec: MakeSpec, folder: Path, tmp_path: Path, wait_until: WaitUntil
) -> None:
    gate = tmp_path / "gate"
    gate.mkdir()
    fields = {"shards": 3, "epochs": None, "max_steps": 300, "workers": {"min": 2, "max": 3}}
    straight = train(make_spec(mode="local", **fields), name="straight", search=[folder])
    args = {"pause_s": 0.3, "gate": str(gate)}
    spec = make_spec(mode="ddp", args=args, **fields)
    memory = PretendedMemory(tmp_path / "memory")
    tight = nodes.add(begin=memory.begin, env=MONITOR)
    ended: list[int] = []

    def tighten() -> None:
        def worker() -> int:
            run = Storage.at(f"{spec.storage}/tight")
            past = read_past(run) if run.exists("spec.yaml") else None
            if past is None or not past.attempts or past.num_steps < 5:
                return 0
            return next(filter(tight.owns, past.attempts[-1].fields["pids"]), 0)

        with suppress(AssertionError):  # told by what is missing in `ended`
            pid = wait_until(worker, 120, "five steps with a worker on the tight node")
            memory.use(3.8)
            wait_until(lambda: not tight.owns(pid), 30, "the memory monitor")
            ended.append(pid)
        memory.use(1.0)
        (gate / "fast").touch()

    thread = threading.Thread(target=tighten)
    thread.start()
    nodes.wait_for(3, num_alive)
    outcome = train(spec, name="tight", search=[folder])
    thread.join()
    nodes.kill(tight)
    assert len(ended) == 1
    assert outcome.status == "done", outcome.message
    assert outcome.digest == straight.digest
    found = summarize(Storage.at(outcome.run))
    assert found.incidents  # a slow machine ends the spare as well, before the memory is back
    for incident in found.incidents:
        assert str(incident.kind) == "out_of_memory"
        assert "was killed because its node ran out of memory" in incident.message
    assert found.num_redone == 0
    assert found.recoveries[0]["cause"] == "out_of_memory"
