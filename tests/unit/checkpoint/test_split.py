"""The split of a state among workers: every byte once, about equal parts, the same for all."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from samestep.checkpoint.split import CUT_BYTES, GRAIN_BYTES, Sized, split

SIZES = st.lists(
    st.tuples(st.integers(0, 40), st.sampled_from([1, 4096, 300_000, 1 << 20]), st.booleans()),
    max_size=12,
)


def sized(found: list[tuple[int, int, bool]]) -> list[Sized]:
    return [
        Sized(name=f"t{n}", num_bytes=count * unit, can_cut=can_cut)
        for n, (count, unit, can_cut) in enumerate(found)
    ]


@given(SIZES, st.integers(1, 9))
def test_every_byte_of_every_tensor_is_in_exactly_one_piece_in_order(
    found: list[tuple[int, int, bool]], num_parts: int
) -> None:
    tensors = sized(found)
    parts = split(tensors, num_parts)
    assert len(parts) == num_parts
    pieces = [piece for part in parts for piece in part]
    assert list(dict.fromkeys(piece.name for piece in pieces)) == [t.name for t in tensors]
    for tensor in tensors:
        mine = [piece for piece in pieces if piece.name == tensor.name]
        assert [piece.start for piece in mine] == [0, *(piece.stop for piece in mine[:-1])]
        assert mine[-1].stop == tensor.num_bytes
        assert [piece.is_whole for piece in mine] == (
            [True] if len(mine) == 1 else [False] * len(mine)
        )
        assert all(piece.num_bytes or len(mine) == 1 for piece in mine)


@given(SIZES, st.integers(1, 9))
def test_only_large_tensors_are_cut_and_never_inside_an_element(
    found: list[tuple[int, int, bool]], num_parts: int
) -> None:
    tensors = {item.name: item for item in sized(found)}
    for part in split(list(tensors.values()), num_parts):
        for piece in part:
            if not piece.is_whole:
                assert tensors[piece.name].can_cut
                assert tensors[piece.name].num_bytes >= CUT_BYTES
                assert piece.start % GRAIN_BYTES == 0


@given(SIZES, st.integers(1, 9))
def test_parts_are_about_equal_where_all_can_be_cut(
    found: list[tuple[int, int, bool]], num_parts: int
) -> None:
    tensors = sized([(count, unit, True) for count, unit, _ in found])
    share = sum(tensor.num_bytes for tensor in tensors) / num_parts
    for part in split(tensors, num_parts):
        assert abs(sum(piece.num_bytes for piece in part) - share) <= CUT_BYTES


def test_one_large_tensor_is_shared_by_all() -> None:
    parts = split([Sized(name="embedding", num_bytes=8 << 20)], 4)
    assert [[piece.num_bytes for piece in part] for part in parts] == [[2 << 20]] * 4
