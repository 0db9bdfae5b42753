import hashlib
import math
import struct

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from samestep.errors import NotExactError
from samestep.exact.digest import (
    canonical_float_hex,
    canonical_order,
    float_from_hex,
    ids_digest,
    live_digest,
    sha256_state,
)


def test_the_canonical_form_is_the_documented_one() -> None:
    tensors = {"b": torch.tensor([1, -2], dtype=torch.int16), "a": torch.tensor(1.5)}
    bytes_ = (
        b'["a","float32",[]]\n' + struct.pack("<f", 1.5)
        + b'["b","int16",[2]]\n' + struct.pack("<hh", 1, -2)
    )  # fmt: skip
    assert live_digest(tensors) == xxhash.xxh3_128(bytes_).hexdigest()
    whole = bytes_ + b'["values"]\n' + b'{"step":3}'
    assert sha256_state(tensors, '{"step":3}') == hashlib.sha256(whole).hexdigest()


def test_names_are_sorted_by_code_point() -> None:
    assert canonical_order(["é", "b", "Z", "a.10", "a.9"]) == ["Z", "a.10", "a.9", "b", "é"]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(6, 4).t(),
        torch.randn(8)[::2],
        torch.randn(3, 1).expand(3, 4),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.empty(2, 0, 3),
        torch.tensor(2.0, dtype=torch.bfloat16),
        torch.tensor([True, False]),
        torch.randn(4).to(torch.float8_e4m3fn),
    ],
)
def test_strides_and_views_do_not_change_a_digest(tensor: Tensor) -> None:
    plain = tensor.resolve_conj().clone(memory_format=torch.contiguous_format)
    assert live_digest({"x": tensor}) == live_digest({"x": plain})


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (torch.zeros(2, 3), torch.zeros(3, 2)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        (torch.tensor(0.0), torch.tensor(-0.0)),
        (torch.zeros(0), torch.zeros(0, 1)),
        (torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.float16)),
    ],
)
def test_shape_dtype_and_every_bit_count(a: Tensor, b: Tensor) -> None:
    assert live_digest({"x": a}) != live_digest({"x": b})
    assert sha256_state({"x": a}, "") != sha256_state({"x": b}, "")
    assert live_digest({"x": a}) != live_digest({"y": a})


def test_sparse_tensors_are_refused_by_name() -> None:
    with pytest.raises(NotExactError, match=r"can't digest emb: layout torch.sparse_coo.*to_dense"):
        live_digest({"emb": torch.eye(2).to_sparse()})


def test_the_cuts_between_shards_count_and_so_do_empty_ones() -> None:
    digests = {
        ids_digest(shards)
        for shards in ([[1, 2], [3]], [[1], [2, 3]], [[1, 2, 3]], [[1, 2], [3], []], [[], []], [])
    }
    assert len(digests) == 6
    assert ids_digest([(1, 2), (3,)]) == ids_digest([[1, 2], [3]])


@given(st.floats())
def test_every_float_comes_back_from_its_hex(value: float) -> None:
    text = canonical_float_hex(value)
    back = float_from_hex(text)
    assert text == canonical_float_hex(back)
    assert (
        math.isnan(back) if math.isnan(value) else struct.pack("d", back) == struct.pack("d", value)
    )


def test_every_nan_is_the_same_and_infinities_are_named() -> None:
    odd = struct.unpack("<d", bytes.fromhex("010000000000f8ff"))[0]
    values = [odd, math.nan, -math.nan, math.inf, -math.inf, -0.0]
    assert [canonical_float_hex(value) for value in values] == [
        "nan", "nan", "nan", "inf", "-inf", "-0x0.0p+0",
    ]  # fmt: skip
    with pytest.raises(ValueError, match="no canonical float"):
        float_from_hex("-nan")
