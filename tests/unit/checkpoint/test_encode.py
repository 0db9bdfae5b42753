import json
import math
import struct
from collections import Counter, OrderedDict, defaultdict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from samestep.checkpoint.encode import TensorRef, decode, dumps, encode, loads
from samestep.checkpoint.equal import first_difference, same
from samestep.errors import CheckpointError

_all_floats = st.integers(0, 2**64 - 1).map(lambda n: struct.unpack("<d", struct.pack("<Q", n))[0])
_hashable = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        _all_floats,
        st.text(st.characters(exclude_categories=[])),
        st.binary(),
        st.complex_numbers(),
        st.sampled_from([torch.float32, torch.bool, torch.device("cpu"), torch.device("cuda", 1)]),
        hnp.from_dtype(np.dtype("float32")),
        st.lists(st.integers(0, 9)).map(torch.Size),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(tuple), st.frozensets(inner, max_size=3)
    ),
    max_leaves=5,
)
_arrays = hnp.arrays(
    st.one_of(hnp.scalar_dtypes(), hnp.unicode_string_dtypes()), hnp.array_shapes(min_dims=0)
)
_values = st.recursive(
    st.one_of(_hashable, _arrays, st.just("$")),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(_hashable, inner, max_size=4),
        st.dictionaries(st.text() | st.just("$"), inner, max_size=4),
        st.dictionaries(_hashable, inner, max_size=3).map(OrderedDict),
        st.dictionaries(_hashable, st.integers(), max_size=3).map(Counter),
        st.sets(_hashable, max_size=3),
    ),
    max_leaves=12,
)


@given(_values)
def test_every_value_comes_back_with_its_types_and_bits(value: Any) -> None:
    text = dumps(value)
    assert first_difference(value, loads(text)) is None
    assert dumps(loads(text)) == text
    assert json.loads(text, parse_constant=pytest.fail) == encode(value)


@given(st.dictionaries(_hashable, _values, max_size=5))
def test_canonical_text_does_not_show_the_order_of_filling(value: dict[Any, Any]) -> None:
    backwards = dict(reversed(value.items()))
    assert dumps(value, canonical=True) == dumps(backwards, canonical=True)


@pytest.mark.parametrize(
    "value",
    [
        10**5000,
        -(2**63),
        2**63,
        "\ud800 lone",
        -0.0,
        {"$": 1},
        {1: "a", "1": "b", 1.5: "c", (1, 2): "d", None: "e"},
        Counter({4: 1}),
        {"best": math.inf, "worst": -math.inf},
        np.float64(0.1),
        np.array(["a", ""]),
        np.asfortranarray(np.arange(6).reshape(2, 3)),
        np.array([], dtype=">i2"),
        np.str_(""),
        TensorRef("optimizer/0/exp_avg"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_awkward_values_come_back(value: Any) -> None:
    assert same(value, loads(dumps(value)))


def test_strict_equality_tells_apart_what_python_calls_equal() -> None:
    for a, b in [
        (True, 1),
        (1, 1.0),
        (0.0, -0.0),
        ((1,), [1]),
        (np.float64(1), 1.0),
        ({1}, {True}),
    ]:
        assert not same(a, b)
    assert not same({"a": 1, "b": 2}, {"b": 2, "a": 1})
    assert not same(torch.tensor(0.0), torch.tensor(-0.0))
    assert same([math.nan], [math.nan])
    assert first_difference({"a": [1, {"b": 2}]}, {"a": [1, {"b": 3}]}) == "a[1].b"


def test_tensors_are_kept_apart_under_the_path_to_them() -> None:
    value = {"groups": [{"lr": torch.tensor(0.1)}], "x.y": (torch.zeros(2, dtype=torch.bfloat16),)}
    sink: dict[str, torch.Tensor] = {}
    text = dumps(value, tensors=sink, path="optimizer")
    assert list(sink) == ["values/optimizer.groups[0].lr", "values/optimizer['x.y'][0]"]
    assert sink["values/optimizer.groups[0].lr"] is value["groups"][0]["lr"]
    assert same(loads(text, tensors=sink), value)
    with pytest.raises(CheckpointError, match=r"'values/optimizer.groups\[0\].lr' is missing"):
        loads(text)


Point = namedtuple("Point", "x y")
_loop: list[Any] = []
_loop.append(_loop)
_deep: list[Any] = []
for _ in range(200):
    _deep = [_deep]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"lr_lambdas": [math.sin]}, r"scheduler\.lr_lambdas\[0\]: <built-in function sin>"),
        ({"a b": {3: {object}}}, r"scheduler\['a b'\]\[3\]\{<class 'object'>\}"),
        ([Point(1, 2)], r"scheduler\[0\]: Point\(x=1, y=2\)"),
        (defaultdict(int), r"scheduler: defaultdict"),
        (_loop, r"scheduler\[0\]: .* it contains itself"),
        (_deep, r"more than 100 levels deep"),
        ([np.array([object()])], r"only arrays of numbers"),
        ([np.zeros(2**18)], r"use torch.from_numpy"),
        ([torch.zeros(1)], r"a tensor can't stand here"),
        ({frozenset([math.cos]): 1}, r"built-in function cos"),
        ([{10**5000: Point}], r"whose repr raised ValueError"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_kept_is_refused_with_the_path_to_it(value: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        encode(value, path="scheduler")
    assert "can't be kept in a checkpoint" in str(caught.value)


def test_a_tensor_with_a_gradient_is_refused() -> None:
    with pytest.raises(CheckpointError, match=r"keep tensor.detach\(\)"):
        encode(torch.zeros(1, requires_grad=True), tensors={})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": NaN}', "NaN is no JSON"),
        ('{"a": 1, "a": 2}', "a key stands twice"),
        ('{"a": ', "not valid JSON"),
        ('{"$": "pickle", "data": ""}', "unknown kind 'pickle'"),
        ('{"$": ["x"]}', "malformed|unknown kind"),
        ('{"$": "tuple"}', "malformed"),
        ('{"$": "float", "bits": "00"}', "malformed"),
        ('{"$": "dtype", "name": "load"}', "malformed"),
        ('{"$": "bytes", "data": "?"}', "malformed"),
        ('{"$": "set", "items": [[1]]}', "malformed"),
        ("[" * 5000 + "]" * 5000, "not valid JSON"),
    ],
)
def test_text_that_nobody_wrote_is_refused(text: str, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        loads(text)


def test_decoding_takes_what_encoding_gave() -> None:
    assert same(decode(encode((1, b"x"))), (1, b"x"))
