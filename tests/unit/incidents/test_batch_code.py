from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kept_shapes import EXECUTED, Frozen, Pair, Row, Trap

from samestep.errors import CheckpointError
from samestep.exact.order import ShardPlan
from samestep.incidents.batch_code import decode_batch, encode_batch
from samestep.incidents.samples import StepSamples

MODULES = ["kept_shapes"]
PLAN = ShardPlan(step=3, epoch=0, shard=0, positions=range(4, 6), ids=(7, 9))


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    kinds = [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex128, torch.uint8]
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    made = (torch.arange(math.prod(shape)) % 251).reshape(shape).to(draw(st.sampled_from(kinds)))
    match draw(st.sampled_from(["dense", "turned", "every other", "expanded", "one of many"])):
        case "turned":
            return made.permute(list(reversed(range(made.ndim))))
        case "every other" if made.ndim:
            return made[..., ::2]
        case "expanded":
            return made.unsqueeze(0).expand(3, *made.shape)
        case "one of many" if made.ndim:
            return torch.stack([made] * 50, dim=made.ndim)[..., 0]
    return made


def arrays() -> st.SearchStrategy[Any]:
    made = st.builds(
        lambda kind, rows, turn: np.arange(rows * 3).reshape(rows, 3).astype(kind)[:: 1 + turn],
        st.sampled_from(["<f4", ">i2", "u1", "?", "c16"]),
        st.integers(0, 3),
        st.integers(0, 1),
    )
    return made | made.map(np.asfortranarray)


LEAVES = (
    tensors()
    | arrays()
    | st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.binary(max_size=5)
)
KEYS = st.text(max_size=3) | st.integers(-3, 3) | st.tuples(st.integers(0, 2), st.text(max_size=1))
BATCHES = st.recursive(
    LEAVES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict)
        | st.builds(Pair, inner, inner)
        | st.builds(Row, st.text(max_size=3), inner, st.lists(inner, max_size=2))
        | st.builds(Frozen, inner)
    ),
    max_leaves=12,
)


def assert_same(a: Any, b: Any) -> None:
    """Same types, same values to the bit, same layout."""
    assert type(a) is type(b)
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert a.contiguous().view(-1).tolist() == b.contiguous().view(-1).tolist()
        sizes = zip(a.shape, a.stride(), b.stride(), strict=True)
        if a.numel():
            assert all(size == 1 or left == right for size, left, right in sizes)
    elif isinstance(a, np.ndarray):
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    elif is_dataclass(a):
        for one in fields(a):
            assert_same(getattr(a, one.name), getattr(b, one.name))
    elif isinstance(a, list | tuple):
        assert len(a) == len(b)
        for left, right in zip(a, b, strict=True):
            assert_same(left, right)
    elif isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            assert_same(a[key], b[key])
    else:
        assert repr(a) == repr(b)


@given(BATCHES)
def test_a_batch_of_any_types_comes_back_from_files_as_it_was(batch: Any) -> None:
    files = StepSamples.of([(PLAN, batch, "")]).to_files()
    parts = {name.rpartition(".")[2]: data for name, data in files.items()}
    EXECUTED.clear()
    read = StepSamples.from_files(parts["json"], parts.get("safetensors"), step=3)
    assert read.is_whole
    assert read.shards[0].plan == PLAN
    assert_same(batch, read.batch(0, modules=MODULES))
    assert EXECUTED == []  # a dataclass is given back, not made anew


@pytest.mark.parametrize(
    ("named", "message"),
    [
        (["kept_shapes", "Trap"], "is no dataclass"),
        (["kept_shapes", "trap"], "is no class"),
        (["os", "system"], "none of the workload's"),
        (["kept_shapes", "Row.__init__"], "malformed|is no class"),
        (["kept_shapes", "Missing"], "malformed"),
        (["kept_shapes", "Workload"], "is no class of that module"),
        (["kept_shapes", "Pair"], "is no dataclass"),
        (["not_loaded", "Row"], "none of the workload's"),
    ],
)
def test_only_classes_of_the_workloads_own_modules_are_rebuilt(
    named: list[str], message: str
) -> None:
    text, tensors = encode_batch(Row("a", 1))
    EXECUTED.clear()
    odd = text.replace('["kept_shapes","Row"]', f'["{named[0]}","{named[1]}"]')
    assert odd != text
    with pytest.raises(CheckpointError, match=message):
        decode_batch(odd, tensors, modules=["kept_shapes", "not_loaded"])
    assert EXECUTED == []


def test_what_can_not_be_kept_is_told_and_the_other_shards_are_kept() -> None:
    other = ShardPlan(step=3, epoch=0, shard=1, positions=range(6, 7), ids=(1,))
    samples = StepSamples.of([(PLAN, {"x": Trap()}, ""), (other, torch.ones(2), "")])
    assert "batch['x']" in samples.shards[0].why
    assert not samples.is_whole
    assert samples.batch(1, modules=()).tolist() == [1, 1]
