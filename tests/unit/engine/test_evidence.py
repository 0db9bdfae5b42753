"""What is kept of an incident while training goes on: all that its step needs, and nothing else."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from attempts import PLACES, Run, Train, replayed
from pool import spec_of
from reading import OneFile

from samestep.checkpoint.reading import load_checkpoint
from samestep.checkpoint.state import state_sha256
from samestep.engine.feed import Fetcher
from samestep.engine.rereading import Rereading
from samestep.engine.survivor import Stage
from samestep.errors import CannotReplayError
from samestep.exact.order import Order
from samestep.exact.seeds import global_generators_kept
from samestep.incidents.bundle import folder_of, has_bundle
from samestep.incidents.bundle_folder import read_bundle
from samestep.incidents.record import Incident, list_incidents, write
from samestep.names import IncidentKind
from samestep.replay.bundle_source import BundleSource
from samestep.telemetry.records import same_values
from samestep.workload import Workload, load_workload

Results = Callable[..., list[Any]]
FOLDER = Path(__file__).resolve().parent
NUM_STEPS = 10


def poisoned(policy: str, **fields: Any) -> dict[str, Any]:
    """Sample 5 is NaN; batches are drawn with noise."""
    incidents = {"non_finite": policy, **fields.pop("incidents", {})}
    rest = {"max_steps": NUM_STEPS, "checkpoint": {"keep": 100, "every_steps": 1}, **fields}
    return spec_of("poisoned:Poisoned", args={"noisy": True}, incidents=incidents, **rest)


def source_of(run: Run, incident: Incident) -> BundleSource:
    return BundleSource(folder_of(run.storage, incident.id), modules=["poisoned", "cases"])


def assert_same_batches(source: BundleSource, step: int) -> None:
    """The bundle's batches equal those that are read again here."""
    spec = source.spec
    with global_generators_kept():
        workload = load_workload(spec.workload, spec.args, [FOLDER])
        dataset = workload.data()
        fetcher = Fetcher(workload, dataset, spec.seed)
        order = Order(
            dataset_size=len(dataset),  # type: ignore[arg-type]
            batch_size=spec.batch_size,
            shards=spec.shards,
            drop_last=spec.drop_last,
            seed=spec.seed,
        )
        assert source.plans(step) == order.shards_of(step)
        for plan in order.shards_of(step):
            if plan.ids:
                for kept, wanted in zip(source.batch(plan), fetcher[plan].batch, strict=True):
                    assert kept.stride() == wanted.stride()
                    assert kept.numpy().tobytes() == wanted.numpy().tobytes()


@pytest.mark.parametrize(
    ("policy", "place"),
    [
        ("stop", PLACES[2]),
        ("skip", PLACES[0]),
        ("continue", PLACES[3]),
        ("rollback", PLACES[1]),
    ],
)
def test_a_bundle_holds_the_state_right_before_the_step_and_its_samples(
    policy: str, place: dict[str, int], train: Train
) -> None:
    run = train(poisoned(policy), "run", **place)
    incident = list_incidents(run.storage)[0]
    step = incident.step
    assert step > 0
    source = source_of(run, incident)
    start = source.start()
    assert (start.state.step, start.rest.stage, start.rest.begun) == (step, Stage.SETTLED, True)
    # What was taken back has no checkpoint any more; the same steps were taken before it.
    calm = train(poisoned("stop"), "calm") if policy == "rollback" else run
    assert state_sha256(start.state) == load_checkpoint(calm.storage, step)[1].digest
    assert source.bundle.state_source == "live"
    assert source.bundle.sample_steps == (step,)
    assert source.bundle.missing == ()
    assert_same_batches(source, step)
    record = source.records()[step]
    assert record.skipped == (policy != "continue")
    # Steps that came behind it while the bundle was written are there too.
    assert sorted(source.records())[: step + 1] == list(range(step + 1))
    if policy in ("skip", "continue"):
        assert same_values(record, run.steps()[step]) == []
    assert source.spec.seed == 3
    assert source.numerics["binding"]["torch"] == torch.__version__


def test_training_gives_the_same_weights_with_and_without_bundles(train: Train) -> None:
    with_bundles = train(poisoned("skip"), "with", world_size=2)
    without = train(poisoned("skip", incidents={"bundle": {"keep": 0}}), "without", world_size=2)
    assert with_bundles.digest == without.digest
    having = [has_bundle(folder_of(with_bundles.storage, i.id)) for i in incidents(with_bundles)]
    assert having[0]
    assert not any(has_bundle(folder_of(without.storage, i.id)) for i in incidents(without))


def incidents(run: Run) -> list[Incident]:
    return list_incidents(run.storage)


def test_a_run_keeps_only_so_many(train: Train) -> None:
    run = train(poisoned("skip", incidents={"bundle": {"keep": 1}}), "run")
    found = incidents(run)
    assert len(found) >= 2
    assert [has_bundle(folder_of(run.storage, i.id)) for i in found] == [
        True,
        *([False] * (len(found) - 1)),
    ]


@pytest.mark.parametrize("where", ["loss", "backward", "before_step"])
def test_an_exception_leaves_the_state_before_the_step_in_a_bundle(
    results: Results, train: Train, tmp_path: Path, where: str
) -> None:
    args = {"where": where, "at": 5, "marker": str(tmp_path / "marker")}
    spec = spec_of(
        "breaking:Breaking",
        args=args | {"rank": None if where == "before_step" else 1},
        max_steps=8,
        batch_size=12,
        checkpoint={"every_steps": 1, "keep": 100},
    )
    answers = results("broken_attempts", 3, spec=spec, run=str(tmp_path / "run"), lost=[None])
    run = Run(tmp_path / "run", answers)
    found = [i for i in incidents(run) if has_bundle(folder_of(run.storage, i.id))]
    (incident,) = found
    assert incident.kind is IncidentKind.EXCEPTION
    assert incident.step == 5
    assert incident.seen["phase"] == where.replace("loss", "forward")
    source = source_of(run, incident)
    start = source.start()
    assert start.rest.begun == (where != "before_step")
    calm_run = train({**spec, "args": {**args, "where": "nowhere"}}, "calm")
    calm = load_checkpoint(calm_run.storage, 5)[0]
    assert start.state.step == 5
    assert start.state.tensors.keys() == calm.tensors.keys()
    differing = [
        n for n in calm.tensors if not torch.equal(calm.tensors[n], start.state.tensors[n])
    ]
    # before_step has scaled the weights, unless it raised first.
    assert differing == ([] if where == "before_step" else ["model/0.weight"])
    assert source.bundle.sample_steps == (() if where == "before_step" else (5,))


def test_a_sample_that_can_not_be_read_is_told_in_the_bundle(train: Train) -> None:
    spec = spec_of("reading:Spoilt", args={"bad": 7}, max_steps=8)
    run = train(spec, "run")
    (incident,) = incidents(run)
    assert incident.seen["phase"] == "data"
    source = source_of(run, incident)
    assert source.bundle.sample_steps == ()
    plans = source.plans(incident.step)
    (bad,) = [plan for plan in plans if 7 in plan.ids]
    assert incident.seen["shard"] == bad.shard
    with pytest.raises(CannotReplayError, match="the disk is gone"):
        source.batch(bad)
    others = [source.batch(plan) for plan in plans if plan is not bad]
    assert len(others) == 3


def test_a_batch_that_breaks_its_contract_is_an_incident_of_its_own_kind(train: Train) -> None:
    run = train(spec_of("reading:Misshapen", max_steps=8), "run")
    (incident,) = incidents(run)
    assert (incident.kind, incident.step) == (IncidentKind.BAD_BATCH, 3)
    assert run.verdict["kind"] == "BadBatchError:2"
    source = source_of(run, incident)
    assert source.bundle.state_step == 3
    assert source.batch(source.plans(3)[0])[0].ndim == 3


def test_of_a_crash_the_next_attempt_keeps_its_state_and_the_samples_up_to_it(
    train: Train,
) -> None:
    spec = spec_of(
        "Conv", max_steps=6, checkpoint={"every_steps": 3}, args={"noisy": True, "lr": 0.001}
    )
    first = train(spec, "run")
    crash = Incident(kind=IncidentKind.CRASH, step=8, attempt=1, message="killed", time=1.0)
    crash = write(first.storage, crash)
    run = train({**spec, "max_steps": 12}, "run", world_size=2)
    calm = train({**spec, "max_steps": 12}, "calm")
    assert run.result, run.verdict
    assert run.digest == calm.digest
    source = BundleSource(folder_of(run.storage, crash.id), modules=["cases"])
    assert source.bundle.state_source == "checkpoint"
    assert source.bundle.state_step == 6
    assert source.bundle.sample_steps == (6, 7, 8)
    assert state_sha256(source.start().state) == load_checkpoint(run.storage, 6)[1].digest
    for step in (6, 7, 8):
        assert_same_batches(source, step)


def test_weights_that_are_not_finite_are_kept_with_a_checkpoint_before_them_or_as_they_are(
    train: Train, tmp_path: Path
) -> None:
    commands, wanted = [], []
    for every_steps in (2, 0):
        spec = spec_of(
            "poisoned:Poisoned",
            args={"bursts_at": 4, "poison": 1.0},
            incidents={"weights_every": 5},
            checkpoint={"every_steps": every_steps},
            max_steps=8,
        )
        run = train(spec, f"run-{every_steps}", world_size=2)
        (incident,) = incidents(run)
        bundle = source_of(run, incident).bundle
        if every_steps:
            assert bundle.state_source == "checkpoint"
            assert bundle.state_step in (2, 4)  # whichever was committed by then
            assert bundle.sample_steps == tuple(range(bundle.state_step, 5))
        else:
            assert (bundle.state_source, bundle.state_step) == ("live", 5)
            assert bundle.sample_steps == (4,)
        commands.append(["replay", str(run.folder), incident.id, "--code", str(FOLDER), "--json"])
        wanted.append(5 - bundle.state_step)
    for answer, num_compared in zip(replayed(tmp_path, commands), wanted, strict=True):
        assert answer["status"] == 0, answer
        found = json.loads(answer["out"])
        assert (found["verdict"], found["weights"]) == ("reproduced", ["3.bias"])
        assert found["compared"] == num_compared


def test_a_state_that_is_too_large_gives_no_bundle_and_the_run_goes_on(train: Train) -> None:
    bundle = {"bundle": {"max_bytes": 2**20}}
    spec = spec_of("Large", args={"lr": 1e30}, max_steps=4)
    run = train({**spec, "incidents": {"non_finite": "continue", **bundle}}, "run")
    assert run.result["status"] == "done"
    assert incidents(run)
    assert not any(has_bundle(folder_of(run.storage, i.id)) for i in incidents(run))


def test_samples_are_left_out_first_and_the_bundle_says_so(train: Train) -> None:
    bundle = {"bundle": {"max_bytes": 2**20}}
    spec = spec_of("reading:Huge", args={"lr": 1e30}, max_steps=4)
    run = train({**spec, "incidents": {"non_finite": "continue", **bundle}}, "run")
    found = [i for i in incidents(run) if has_bundle(folder_of(run.storage, i.id))]
    bundle = read_bundle(folder_of(run.storage, found[0].id))
    assert bundle.sample_steps == ()
    assert "incidents.bundle.max_bytes" in bundle.missing[0]
    assert bundle.num_bytes < 2**20
    assert source_of(run, found[0]).plans(found[0].step)


def test_reading_again_moves_no_file_of_the_training_and_keeps_no_connection_open(
    tmp_path: Path,
) -> None:
    dataset = OneFile(tmp_path / "numbers", 1000)
    ours, theirs = socket.socketpair()
    order = Order(dataset_size=1000, batch_size=50, shards=2, drop_last=False, seed=1)
    dataset.file.seek(400)
    reading = Rereading(
        Fetcher(Workload(), dataset, 1), order.shards_of, range(20), max_bytes=1 << 20, redact=str
    )
    # Both read at once, from one file that both have open.
    ours.close()
    here = [int.from_bytes(dataset.file.read(4), "little") for _ in range(200)]
    assert here == list(range(100, 300))
    found, why = reading.finish()
    assert why == ""
    assert sorted(found) == list(range(20))
    theirs.settimeout(10)
    assert theirs.recv(1) == b""
    reading.close()
    assert not reading._folder.exists()
    dataset.file.close()
    theirs.close()


def test_reading_again_ends_in_time_whatever_it_hangs_in(tmp_path: Path) -> None:
    class Hanging(OneFile):
        def __getitem__(self, index: int) -> Any:
            signal_never = torch.multiprocessing.get_context("fork").Event()
            signal_never.wait()

    dataset = Hanging(tmp_path / "numbers", 10)
    order = Order(dataset_size=10, batch_size=5, shards=1, drop_last=False, seed=1)
    reading = Rereading(
        Fetcher(Workload(), dataset, 1),
        order.shards_of,
        [0],
        max_bytes=1 << 20,
        redact=str,
        limit_s=0.3,
    )
    assert reading.finish() == ({}, "reading the samples again took more than 0.3 s")
    reading.close()
    dataset.file.close()
