from __future__ import annotations

import math

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from samestep import yaml12

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=20)
)
PLAIN = st.recursive(
    SCALARS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("1.5E+3", 1500.0),
        (".5", 0.5),
        ("-.inf", -math.inf),
        ("1:4", "1:4"),
        ("010", 10),
        ("0x1F", 31),
        ("0o17", 15),
        ("1_000", "1_000"),
        ("on", "on"),
        ("no", "no"),
        ("True", True),
        ("2024-01-01", "2024-01-01"),
        ("~", None),
        ("", None),
        ("'1e-3'", "1e-3"),
    ],
)
def test_scalars_are_those_of_the_core_schema(text: str, value: object) -> None:
    (loaded,) = yaml12.load(f"- {text}")
    assert loaded == value
    assert type(loaded) is type(value)


def test_nan_is_read_as_a_number() -> None:
    assert math.isnan(yaml12.load(".nan"))
    assert math.isnan(yaml12.load(yaml12.dump(math.nan)))


def test_a_key_given_twice_is_refused_with_its_line() -> None:
    with pytest.raises(yaml.YAMLError, match=r"'batch_size' is given twice(.|\n)*line 3"):
        yaml12.load("batch_size: 4\nepochs: 1\nbatch_size: 8\n")


def test_a_merge_may_be_overridden_and_is_no_key_given_twice() -> None:
    assert yaml12.load("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}")["b"] == {"x": 1, "y": 3}


def test_tags_of_python_objects_are_refused() -> None:
    with pytest.raises(yaml.YAMLError, match="python/object"):
        yaml12.load("a: !!python/object/apply:os.getcwd []")


@given(PLAIN)
def test_what_is_dumped_is_loaded_again_type_for_type(value: object) -> None:
    assert repr(yaml12.load(yaml12.dump(value))) == repr(value)


@given(PLAIN)
def test_readers_of_yaml_1_1_read_the_same_from_a_dump(value: object) -> None:
    assert repr(yaml.safe_load(yaml12.dump(value))) == repr(value)
