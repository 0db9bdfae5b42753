"""Whatever is done to a bundle, it is refused with a clear error, and nothing in it is executed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from kept_shapes import EXECUTED
from sealing import STATE_MANIFEST, files_in, reseal, sealed

from samestep.checkpoint.storage import Storage
from samestep.errors import BundleError, SamestepError
from samestep.replay.bundle_source import BundleSource

few = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
ODD: list[Any] = [
    *(None, True, -1, 0, 2**70, 1.5, 1e308, "", "x", "../x", "/etc/passwd", [], {}, [[]], ["x"]),
    *([-1], [2**80], {"x": 1}, {"num_bytes": -1, "sha256": "0" * 64}),
]


def read_all(folder: Storage) -> None:
    """Everything that a replay reads of a bundle."""
    source = BundleSource(folder, modules=["kept_shapes"])
    _ = source.spec, source.incident, source.numerics, source.provenance
    source.start()
    source.records()
    source.events()
    for step in source.bundle.sample_steps:
        for plan in source.plans(step):
            source.batch(plan)


@contextlib.contextmanager
def copied(folder: Storage) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as parent:
        copy = Path(parent, "bundle")
        shutil.copytree(folder.root, copy)
        yield copy


def refused_or_harmless(folder: Path) -> None:
    """No other exception than ours; no class made, no module loaded."""
    EXECUTED.clear()
    loaded = set(sys.modules)
    with contextlib.suppress(SamestepError):
        read_all(Storage.at(str(folder)))
    assert EXECUTED == []
    assert set(sys.modules) == loaded


def must_be_refused(folder: Path) -> None:
    EXECUTED.clear()
    loaded = set(sys.modules)
    with pytest.raises(SamestepError):
        read_all(Storage.at(str(folder)))
    assert EXECUTED == []
    assert set(sys.modules) == loaded


def test_an_untouched_copy_is_read(whole_bundle: Storage) -> None:
    read_all(whole_bundle)  # loads what reading needs
    with copied(whole_bundle) as folder:
        read_all(Storage.at(str(folder)))
        reseal(folder)
        read_all(Storage.at(str(folder)))


def change(data: bytes, draw: Callable[..., Any]) -> bytes:
    place = draw(st.integers(0, max(0, len(data) - 1)))
    match draw(st.sampled_from(["flip", "insert", "delete", "truncate", "append", "empty"])):
        case "flip":
            bit = 1 << draw(st.integers(0, 7))
            return data[:place] + bytes([data[place] ^ bit]) + data[place + 1 :] if data else b"x"
        case "insert":
            return data[:place] + draw(st.binary(min_size=1, max_size=8)) + data[place:]
        case "delete":
            return data[:place] + data[place + draw(st.integers(1, 8)) :]
        case "truncate":
            return data[:place]
        case "append":
            return data + draw(st.binary(min_size=1, max_size=8))
    return b""


@few
@given(data=st.data())
def test_any_change_of_any_byte_is_refused(whole_bundle: Storage, data: st.DataObject) -> None:
    with copied(whole_bundle) as folder:
        name = data.draw(st.sampled_from(files_in(folder)))
        before = (folder / name).read_bytes()
        after = change(before, data.draw)
        assume(after != before)
        if name == "bundle.json":
            # JSON has room for spaces: what says the same is the same.
            assume(as_json(after) != as_json(before))
        (folder / name).write_bytes(after)
        must_be_refused(folder)


def as_json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except ValueError:
        return None


@few
@given(data=st.data())
def test_files_that_are_renamed_swapped_removed_or_added_are_refused(
    whole_bundle: Storage, data: st.DataObject
) -> None:
    with copied(whole_bundle) as folder:
        names = files_in(folder)
        first = data.draw(st.sampled_from(names))
        match data.draw(st.sampled_from(["rename", "swap", "remove", "add", "folder"])):
            case "rename":
                (folder / first).rename(folder / (first + "x"))
            case "swap":
                second = data.draw(st.sampled_from(names))
                one, two = (folder / first).read_bytes(), (folder / second).read_bytes()
                assume(one != two)
                (folder / first).write_bytes(two)
                (folder / second).write_bytes(one)
            case "remove":
                (folder / first).unlink()
            case "add":
                (folder / "state" / "more.safetensors").write_bytes(b"x")
            case "folder":
                (folder / first).unlink()
                (folder / first).mkdir()
        must_be_refused(folder)


@pytest.mark.parametrize("target", ["elsewhere", "same", "folder"])
def test_links_are_refused_wherever_they_lead(whole_bundle: Storage, target: str) -> None:
    with copied(whole_bundle) as folder:
        if target == "folder":
            (folder / "state").rename(folder.parent / "state")
            (folder / "state").symlink_to(folder.parent / "state")
        elif target == "same":
            (folder / "spec.yaml").rename(folder.parent / "spec.yaml")
            (folder / "spec.yaml").symlink_to(folder.parent / "spec.yaml")
        else:
            (folder / "step.json").unlink()
            (folder / "step.json").symlink_to("/etc/passwd")
        with pytest.raises(BundleError, match="is a link or a device"):
            read_all(Storage.at(str(folder)))


def test_a_device_is_refused(whole_bundle: Storage) -> None:
    with copied(whole_bundle) as folder:
        (folder / "step.json").unlink()
        os.mkfifo(folder / "step.json")
        with pytest.raises(BundleError, match="is a link or a device"):
            read_all(Storage.at(str(folder)))


@few
@given(data=st.data())
def test_odd_fields_are_refused_however_well_they_are_sealed(
    whole_bundle: Storage, data: st.DataObject
) -> None:
    with copied(whole_bundle) as folder:
        body = json.loads((folder / "bundle.json").read_bytes())
        key = data.draw(st.sampled_from(sorted(body)))
        match data.draw(st.sampled_from(["odd", "missing", "extra", "within"])):
            case "odd":
                body[key] = data.draw(st.sampled_from(ODD))
            case "missing":
                del body[key]
            case "extra":
                body[data.draw(st.text(max_size=4))] = data.draw(st.sampled_from(ODD))
            case "within":
                name = data.draw(st.sampled_from(sorted(body["files"])))
                body["files"][
                    data.draw(st.sampled_from([name, "../x", "/x", "a//b", "state/."]))
                ] = data.draw(st.sampled_from(ODD))
        (folder / "bundle.json").write_bytes(sealed(body))
        refused_or_harmless(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 2}, "reads format 1"),
        ({"files": {}}, "lists no"),
        ({"extra": 1}, "'extra' is unknown"),
        ({"step": "3"}, "step should be int"),
        ({"step": True}, "step should be int"),
        ({"incident": "../../x"}, "is no id"),
        ({"state_step": 5}, "is behind"),
        ({"num_bytes": 1}, "not the sum"),
        ({"sample_steps": [9]}, "not steps between"),
        ({"kind": "sneeze"}, "sneeze"),
        ({"environment": {"A": 1}}, "is no text"),
    ],
)
def test_a_field_that_is_wrong_is_named(
    whole_bundle: Storage, changes: dict[str, Any], message: str
) -> None:
    with copied(whole_bundle) as folder:
        body = json.loads((folder / "bundle.json").read_bytes())
        (folder / "bundle.json").write_bytes(sealed({**body, **changes}))
        with pytest.raises(BundleError, match=message):
            read_all(Storage.at(str(folder)))


@few
@given(data=st.data())
def test_odd_content_under_right_hashes_raises_nothing_but_our_errors(
    whole_bundle: Storage, data: st.DataObject
) -> None:
    with copied(whole_bundle) as folder:
        name = data.draw(st.sampled_from([n for n in files_in(folder) if n != "bundle.json"]))
        path = folder / name
        before = path.read_bytes()
        parsed = as_json(before) if name.endswith(".json") else None
        if parsed is not None and data.draw(st.booleans()):
            path.write_text(json.dumps(mutated(parsed, data.draw)))
        else:
            path.write_bytes(change(before, data.draw))
        reseal(folder)
        refused_or_harmless(folder)


def mutated(value: Any, draw: Callable[..., Any], depth: int = 0) -> Any:
    """The same with something odd at a place of choice."""
    inner = list(value.items()) if isinstance(value, dict) else []
    if isinstance(value, list):
        inner = list(enumerate(value))
    if not inner or (depth and draw(st.integers(0, 3)) == 0):
        odd = draw(st.sampled_from([*ODD, {"$": "dtype", "name": "_dynamo"}, {"$": "int"}]))
        return {"$": "tensor", "name": odd} if draw(st.integers(0, 9)) == 0 else odd
    key, child = draw(st.sampled_from(inner))
    made = dict(value) if isinstance(value, dict) else list(value)
    made[key] = mutated(child, draw, depth + 1)
    return made


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("spec.yaml", "a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n"),
        ("spec.yaml", "!!python/object/apply:os.system ['true']"),
        ("spec.yaml", "[" * 5000),
        ("ledger.jsonl", "[" * 100_000),
        ("ledger.jsonl", '{"type": "step", "step": 1e999}'),
        ("ledger.jsonl", '{"type": "step", "step": NaN}'),
        ("incident.json", '{"a":' * 90 + "1" + "}" * 90),
        ("samples/step-00000003.json", '{"format": 1, "step": 3, "shards": []}'),
        ("state/values.json", '{"format": 2, "values": ' + "[" * 900 + "]" * 900 + "}"),
    ],
)
def test_what_would_hurt_a_careless_reader_is_refused(
    whole_bundle: Storage, name: str, content: str
) -> None:
    with copied(whole_bundle) as folder:
        (folder / name).write_text(content)
        reseal(folder)
        must_be_refused(folder)


def test_a_layout_that_would_fill_the_memory_is_refused(whole_bundle: Storage) -> None:
    with copied(whole_bundle) as folder:
        path = folder / STATE_MANIFEST
        body = json.loads(path.read_bytes())
        body["tensors"]["model/w"]["strides"] = [1, 2**50]
        path.write_text(json.dumps(body))
        reseal(folder)
        with pytest.raises(BundleError, match="far more memory"):
            read_all(Storage.at(str(folder)))


def test_hashes_are_compared_before_anything_is_used(whole_bundle: Storage) -> None:
    with copied(whole_bundle) as folder:
        data = (folder / "spec.yaml").read_bytes()
        (folder / "spec.yaml").write_bytes(data[:-1] + b" ")
        with pytest.raises(BundleError, match=hashlib.sha256(data).hexdigest()):
            BundleSource(Storage.at(str(folder)))
