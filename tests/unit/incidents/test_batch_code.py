from __future__ import annotations

import dataclasses
from collections import OrderedDict
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from samestep.checkpoint.encode import dumps
from samestep.errors import CheckpointError
from samestep.incidents.batch_code import decode_batch, encode_batch


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass(frozen=True)
class Item:
    x: torch.Tensor
    name: str
    init_runs: dataclasses.InitVar[int] = 0

    def __post_init__(self, init_runs: int) -> None:
        if init_runs:
            raise AssertionError("built anew instead of put back")


def round_trip(batch: Any, modules: tuple[str, ...] = (__name__,)) -> Any:
    text, tensors = encode_batch(batch)
    return decode_batch(text, tensors, modules=modules)


def test_containers_come_back_as_they_were() -> None:
    batch = {
        "list": [1, (2.5, None)],
        3: OrderedDict(b=torch.arange(3), a="text"),
        "pair": Pair(torch.ones(2), [True]),
        "item": Item(torch.zeros(1, 2), "n"),
    }
    made = round_trip(batch)
    assert list(made) == list(batch)
    assert made["list"] == [1, (2.5, None)]
    assert type(made["list"][1]) is tuple
    assert type(made[3]) is OrderedDict
    assert list(made[3]) == ["b", "a"]
    assert torch.equal(made[3]["b"], torch.arange(3))
    assert type(made["pair"]) is Pair
    assert made["pair"].right == [True]
    assert type(made["item"]) is Item
    assert made["item"].name == "n"


def test_an_object_that_looks_like_the_encoding_is_not_mistaken_for_it() -> None:
    tricky = {"kind": "dataclass", "class": ["os", "system"], "items": [["command", "true"]]}
    assert round_trip(tricky) == tricky


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.int32).reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.array([True, False]),
        np.zeros((0, 4), dtype=np.complex64),
        np.array(7.5, dtype=">f4"),
    ],
)
def test_arrays_keep_dtype_shape_order_and_values(array: np.ndarray[Any, Any]) -> None:
    made = round_trip([array])[0]
    assert (made.dtype, made.shape) == (array.dtype, array.shape)
    assert made.flags.f_contiguous == array.flags.f_contiguous
    assert np.array_equal(made, array)
    assert made.flags.writeable


def test_a_tensor_keeps_whether_it_requires_a_gradient() -> None:
    made = round_trip((torch.ones(1, requires_grad=True), torch.ones(1)))
    assert [tensor.requires_grad for tensor in made] == [True, False]


def test_only_classes_of_the_workloads_own_modules_are_rebuilt() -> None:
    text, tensors = encode_batch(Pair(1, 2))
    with pytest.raises(
        CheckpointError, match=r"Pair, whose module is none of the workload's \(a\)"
    ):
        decode_batch(text, tensors, modules=["a"])


@pytest.mark.parametrize(
    "data",
    [
        {"kind": "named_tuple", "class": ["os", "system"], "items": []},
        {"kind": "named_tuple", "class": [__name__, "pytest"], "items": []},
        {"kind": "named_tuple", "class": [__name__, "Item"], "items": []},
        {"kind": "dataclass", "class": [__name__, "Pair"], "items": []},
        {"kind": "dataclass", "class": [__name__, "Item.__init__"], "items": []},
        {"kind": "dataclass", "class": [__name__, "Item"], "items": [["y", {"kind": "value"}]]},
        {"kind": "named_tuple", "class": [__name__, "Pair"], "items": [["left", None]]},
        {"kind": "eval", "value": "1"},
        {"kind": "array", "dtype": "O", "shape": [1], "fortran": False, "value": 1},
        {"kind": "tensor", "grad": False, "value": 3},
        {"kind": "list", "items": 3},
        ["kind"],
        None,
    ],
)
def test_what_was_tampered_with_is_refused(data: Any) -> None:
    with pytest.raises(CheckpointError):
        decode_batch(dumps(data), {}, modules=["os", __name__])


def test_what_cannot_be_kept_is_named_with_its_path() -> None:
    with pytest.raises(CheckpointError, match="object"):
        encode_batch({"a": [object()]})
