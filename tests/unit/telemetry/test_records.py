from __future__ import annotations

import json
import math
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep.errors import StorageError
from samestep.names import Event
from samestep.telemetry.records import (
    EventRecord,
    StepRecord,
    differing_metrics,
    pack,
    pack_float,
    same_values,
    unpack,
    unpack_float,
)


def bits(value: float) -> bytes:
    return b"nan" if math.isnan(value) else struct.pack("<d", value)


def through_json(data: Any) -> Any:
    return json.loads(json.dumps(data, allow_nan=False))


@given(st.floats())
def test_a_float_comes_back_with_its_bits(value: float) -> None:
    assert bits(unpack_float(through_json(pack_float(value)))) == bits(value)


def test_a_packed_float_reads_like_one_beside_its_exact_form() -> None:
    assert pack_float(0.5) == {"v": 0.5, "hex": "0x1.0000000000000p-1"}
    assert pack_float(-math.inf) == {"v": None, "hex": "-inf"}
    assert pack_float(-math.nan) == {"v": None, "hex": "nan"}


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_plain_data_comes_back_whatever_it_nests(value: Any) -> None:
    if isinstance(value, dict) and value.keys() == {"v", "hex"}:
        return
    assert unpack(through_json(pack(value))) == value


def test_a_step_record_comes_back_from_json(make_step: Any) -> None:
    record = make_step(7, loss=math.inf, state_digest="ab", skipped=True, attempt=2)
    assert StepRecord.from_json(through_json(record.to_json())) == record


def test_an_event_comes_back_from_json() -> None:
    event = EventRecord(
        event=Event.EVALUATION,
        step=5,
        attempt=1,
        time=12.5,
        fields={"metrics": {"accuracy": 0.1}, "samples": 5},
    )
    assert EventRecord.from_json(through_json(event.to_json())) == event


@pytest.mark.parametrize("damage", [{"lr": None}, {"loss": {"v": 1}}, {"step": "x"}])
def test_a_malformed_step_line_is_refused_by_name(make_step: Any, damage: dict[str, Any]) -> None:
    data = make_step(0).to_json() | damage
    del data["ids"]
    with pytest.raises(StorageError, match="step line of the ledger is malformed"):
        StepRecord.from_json(data)


def test_an_event_that_is_none_of_the_list_is_refused() -> None:
    with pytest.raises(StorageError, match="celebration"):
        EventRecord.from_json(
            {"event": "celebration", "step": 0, "attempt": 0, "time": 0, "fields": {}}
        )


def test_the_last_bit_of_a_loss_counts_and_both_values_are_told(make_step: Any) -> None:
    a = make_step(0, loss=0.1)
    b = make_step(0, loss=math.nextafter(0.1, 1))
    (line,) = same_values(a, b)
    assert line == "loss: 0x1.999999999999ap-4 (0.1) against 0x1.999999999999bp-4 (0.1)"


def test_every_nan_equals_every_other_and_minus_zero_is_not_zero(make_step: Any) -> None:
    assert same_values(make_step(0, loss=math.nan), make_step(0, loss=-math.nan)) == []
    assert same_values(make_step(0, loss=0.0), make_step(0, loss=-0.0)) != []


def test_timing_and_attempt_are_never_compared(make_step: Any) -> None:
    assert same_values(make_step(0, attempt=1), make_step(0, attempt=2, timing={})) == []


def test_a_digest_of_the_state_counts_where_both_have_one(make_step: Any) -> None:
    assert same_values(make_step(0, state_digest="a"), make_step(0)) == []
    found = same_values(make_step(0, state_digest="a"), make_step(0, state_digest="b"))
    assert found == ["state_digest: a against b"]


@pytest.mark.parametrize(
    ("name", "value", "quantity"),
    [
        ("ids", "ff", "ids"),
        ("samples", 7, "samples"),
        ("epoch", 3, "epoch"),
        ("skipped", True, "skipped"),
        ("lr", [0.2], "lr[0]"),
        ("lr", [0.1, 0.1], "lr"),
        ("shard_losses", [0.0, 1.0], "shard_losses[1]"),
        ("shard_weights", [7.0, None], "shard_weights[0]"),
        ("grad_norm", None, "grad_norm"),
        ("metrics", {"accuracy": 1.0}, "metrics.accuracy"),
        ("metrics", {}, "metrics.accuracy"),
    ],
)
def test_each_quantity_is_compared_and_named(
    make_step: Any, name: str, value: Any, quantity: str
) -> None:
    (line,) = same_values(make_step(0), make_step(0, **{name: value}))
    assert line.partition(": ")[0] == quantity


def test_a_tolerance_forgives_small_differences_but_not_other_samples(make_step: Any) -> None:
    a, near, far = make_step(0, loss=1.0), make_step(0, loss=1.0005), make_step(0, loss=1.1)
    assert same_values(a, near) != []
    assert same_values(a, near, tolerance=1e-3) == []
    assert same_values(a, far, tolerance=1e-3) != []
    assert same_values(a, make_step(0, loss=math.nan), tolerance=1e-3) != []
    assert same_values(a, make_step(0, loss=1.0, ids="ff"), tolerance=1e-3) != []


def test_metrics_that_only_one_side_has_differ() -> None:
    assert differing_metrics({"a": 1.0}, {"b": 1.0}) == [
        "metrics.a: 0x1.0000000000000p+0 (1) against absent",
        "metrics.b: absent against 0x1.0000000000000p+0 (1)",
    ]
