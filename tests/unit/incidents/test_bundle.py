from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from bundle_making import NUMERICS, STATE_STEP, STEP, make_bundle, order, record, state
from kept_shapes import Pair, Row, Shapes

from samestep.checkpoint.state import state_sha256
from samestep.checkpoint.storage import Storage
from samestep.engine.feed import Fetcher
from samestep.engine.survivor import HELD_KEY, Stage
from samestep.errors import BundleError, CannotReplayError
from samestep.exact.seeds import global_generators_kept
from samestep.incidents.bundle import has_bundle
from samestep.incidents.bundle_folder import read_bundle, verify_bundle
from samestep.incidents.record import read
from samestep.names import BUNDLE_FILE, IncidentKind
from samestep.replay.bundle_source import BundleSource
from samestep.spec import parse_spec
from samestep.telemetry.records import same_values


def files_of(folder: Storage) -> dict[str, bytes]:
    root = Path(folder.root)
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file()
    }


def messages(folder: Storage) -> list[str]:
    return list(read_bundle(folder).missing)


def test_a_bundle_gives_back_what_it_was_made_of(whole_bundle: Storage) -> None:
    source = BundleSource(whole_bundle, modules=["kept_shapes"])
    assert (source.step, source.incident.kind) == (STEP, IncidentKind.EXCEPTION)
    assert source.incident.message == "boom"
    assert source.spec.workload == "kept_shapes:Shapes"
    assert source.numerics == NUMERICS
    start, kept = source.start(), state()
    assert (start.rest.stage, start.rest.begun) == (Stage.SETTLED, True)
    assert start.rest.values is not None
    assert start.rest.values["lr"] == (0.1,)
    assert HELD_KEY not in start.state.extras
    del kept.extras[HELD_KEY]
    assert state_sha256(start.state) == state_sha256(kept)
    assert start.state.tensors["model/w"].stride() == kept.tensors["model/w"].stride()
    records = source.records()
    assert sorted(records) == [0, 1, 2, STEP]
    assert all(not same_values(records[step], record(step)) for step in records)
    assert str(source.events()[0].event) == "attempt_started"
    assert source.bundle.state_source == "snapshot"
    assert source.provenance["packages"]["torch"]


def test_the_samples_are_those_of_the_steps_from_the_states_on(whole_bundle: Storage) -> None:
    source = BundleSource(whole_bundle, modules=["kept_shapes"])
    spec = parse_spec({"workload": "m:C", "batch_size": 6, "shards": 2, "max_steps": 100})
    workload = Shapes()
    fetcher = Fetcher(workload, workload.data(), spec.seed)
    for step in (STATE_STEP, STEP):
        assert source.has_samples(step)
        assert source.plans(step) == order(spec).shards_of(step)
        for plan in source.plans(step):
            with global_generators_kept():
                expected = fetcher[plan].batch
            batch = source.batch(plan)
            assert [type(key) for key in batch] == [str, str, int]
            assert torch.equal(batch["noise"], expected["noise"])
            assert batch["noise"].stride() == expected["noise"].stride() == (1, 0)
            assert type(batch[7]) is Pair
            for row, wanted in zip(batch["rows"], expected["rows"], strict=True):
                assert type(row) is Row
                assert (row.name, row.more) == (wanted.name, wanted.more)
                assert torch.equal(row.value, wanted.value)
                assert row.value.stride() == wanted.value.stride() == (1, 2)
            assert source.batch(plan)["rows"][0].value is not batch["rows"][0].value
    assert not source.has_samples(STEP + 1)
    with pytest.raises(CannotReplayError, match="does not hold which samples step 4 takes"):
        source.plans(STEP + 1)


def test_a_sample_that_can_not_be_read_is_told_and_the_other_shards_are_there(
    tmp_path: Path,
) -> None:
    spec = parse_spec({"workload": "m:C", "batch_size": 6, "shards": 2, "max_steps": 100})
    bad = order(spec).shards_of(STEP)[1].ids[1]

    def spoil(index: int) -> None:
        if index == bad:
            raise OSError(f"disk error at {index}")

    folder = make_bundle(tmp_path / "run", spoil=spoil)
    assert messages(folder) == [
        f"samples of step 3, shard 1: reading sample {bad} (step 3, shard 1) raised OSError: disk "
        f"error at {bad}"
    ]
    source = BundleSource(folder, modules=["kept_shapes"])
    assert not source.has_samples(STEP)
    assert source.has_samples(STATE_STEP)
    first, second = source.plans(STEP)
    assert len(source.batch(first)["rows"]) == 3
    with pytest.raises(CannotReplayError, match=f"disk error at {bad}"):
        source.batch(second)


def test_only_classes_of_the_given_modules_are_rebuilt(whole_bundle: Storage) -> None:
    source = BundleSource(whole_bundle)
    (plan, *_) = source.plans(STEP)
    with pytest.raises(BundleError, match="none of the workload's"):
        source.batch(plan)


def test_sources_and_records_stand_in_it_and_sizes_are_told(whole_bundle: Storage) -> None:
    bundle = verify_bundle(whole_bundle)
    assert "code/kept_shapes.py" in bundle.files
    assert bundle.num_bytes == sum(
        len(data) for name, data in files_of(whole_bundle).items() if name != BUNDLE_FILE
    )
    assert bundle.num_bytes < bundle.max_bytes
    run = Storage.at(str(Path(whole_bundle.root).parents[1]))
    assert read(run, bundle.incident).id == bundle.incident


def test_no_byte_of_a_bundle_tells_a_secret(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret, password = "hüsh\"hush'\n42", "pass-word-1"
    monkeypatch.setenv("BUNDLE_TEST_TOKEN", "env-token-1")
    monkeypatch.setenv("BUNDLE_TEST_TOLD", "told-value-1")
    folder = make_bundle(
        tmp_path / "run",
        args={"token": secret, "nested": {"keys": [secret], "size": 3}, "size": 3},
        tracking={"uri": f"https://user:{password}@host/path?api_key=query-1&x=2"},
        message=f"can't log in with {secret} at https://user:{password}@host",
        incidents={
            "bundle": {
                "code": True,
                "secret_args": ["token", "nested", "not there"],
                "environment": ["BUNDLE_TEST_TOLD"],
            }
        },
    )
    whole = b"".join(files_of(folder).values())
    for text in (secret, password, "query-1", "env-token-1"):
        for form in (text, json.dumps(text)[1:-1], repr(text)[1:-1]):
            assert form.encode() not in whole
    source = BundleSource(folder)
    assert source.left_out == ("args.token", "args.nested", "tracking.uri")
    assert source.spec.args["size"] == 3
    assert source.spec.args["token"] == "(left out: secret)"
    assert source.spec.tracking.uri == "https://host/path?api_key=(left_out:_secret)&x=2"
    assert source.bundle.environment["BUNDLE_TEST_TOKEN"] is None
    assert source.bundle.environment["BUNDLE_TEST_TOLD"] == "told-value-1"
    assert "can't log in with (left out: secret) at https://host" in source.incident.message


def test_a_file_of_the_workload_with_a_secret_in_it_is_left_out(tmp_path: Path) -> None:
    folder = make_bundle(
        tmp_path / "run",
        args={"token": "No class for a batch"},  # stands in the module
        incidents={"bundle": {"code": True, "secret_args": ["token"]}},
    )
    assert "code: code/kept_shapes.py: it holds the value of a secret arg" in messages(folder)
    assert "code/kept_shapes.py" not in read_bundle(folder).files


def test_a_bundle_that_is_not_finished_is_none(whole_bundle: Storage, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(whole_bundle.root, copy)
    (copy / BUNDLE_FILE).unlink()
    assert not has_bundle(Storage.at(str(copy)))
    with pytest.raises(BundleError, match=r"has no bundle\.json: it was never finished"):
        BundleSource(Storage.at(str(copy)))


def test_a_report_may_lie_beside_it(whole_bundle: Storage, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(whole_bundle.root, copy)
    (copy / "report.html").write_text("<p>")
    (copy / ".spec.yaml.1-0.tmp").write_text("of a writer that was killed")
    verify_bundle(Storage.at(str(copy)))
    (copy / "other.html").write_text("<p>")
    with pytest.raises(BundleError, match=r"other\.html is not listed"):
        verify_bundle(Storage.at(str(copy)))
