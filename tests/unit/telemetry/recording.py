"""What the tests of the recorder share."""

from __future__ import annotations

import json

import torch

from samestep.checkpoint.manifest import CheckpointMeta
from samestep.checkpoint.state import State
from samestep.checkpoint.storage import Storage
from samestep.checkpoint.writing import write_files
from samestep.names import LEASE_PREFIX
from samestep.spec import dump_spec, parse_spec
from samestep.telemetry.ledger import events
from samestep.telemetry.recorder import Recorder

CPU_A = {"binding": {"torch": "2.13", "threads": 1}, "informational": {}}
CPU_B = {"binding": {"torch": "2.14", "threads": 1}, "informational": {}}


def job(**changes: object) -> str:
    spec = {"workload": "digits:Digits", "batch_size": 8, "max_steps": 100, "shards": 2}
    return dump_spec(parse_spec({**spec, **changes}))


def begin(recorder: Recorder, start_step: int = 0, **info: object) -> int:
    given = {"start_step": start_step, "mode": "local", "world_size": 1, "numerics": CPU_A}
    return recorder.begin_attempt({**given, **info})


def take_over(run: Storage, recorder: Recorder) -> None:
    """Another process takes the run from a recorder, which notices."""
    assert run.local_path is not None
    (lease,) = run.local_path.glob(f"{LEASE_PREFIX}*.json")
    taken = json.loads(lease.read_text()) | {"owner": "another"}
    lease.with_name(f"{LEASE_PREFIX}99999999.json").write_text(json.dumps(taken))
    assert recorder._tenure._lease is not None
    recorder._tenure._lease.renew()


def save(run: Storage, step: int) -> str:
    state = State(step=step, tensors={"model/w": torch.full((3,), step)}, values={"extras": {}})
    meta = CheckpointMeta(numerics=CPU_A, spec={}, created_s=0.0)
    return write_files(run, state, meta).to_json()


def kinds(run: Storage) -> list[str]:
    return [str(event.event) for event in events(run)]
