from __future__ import annotations

import inspect
import pickle
import re
from pathlib import Path

import pytest

from samestep import errors
from samestep.errors import ExitStatus, SamestepError

PAGE = Path(__file__).resolve().parents[2] / "docs" / "exit-statuses.md"
ALL = sorted(
    (
        value
        for value in vars(errors).values()
        if inspect.isclass(value) and issubclass(value, SamestepError)
    ),
    key=lambda cls: cls.__name__,
)


def test_the_page_of_exit_statuses_names_each() -> None:
    rows = re.findall(r"^\| (\d+) \| \w", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert list(map(int, rows)) == sorted(ExitStatus)


def drawn_tree() -> dict[str, tuple[int, str]]:
    """From the module's docstring: name -> (indent, exit status or "")."""
    assert errors.__doc__ is not None
    rows = re.findall(
        r"^ {4}([ │├└─]*)([A-Z]\w+Error)(?: +(\d+))?", errors.__doc__, flags=re.MULTILINE
    )
    return {name: (len(indent), status) for indent, name, status in rows}


def test_the_drawn_tree_names_every_exception_and_no_other() -> None:
    assert sorted(drawn_tree()) == [cls.__name__ for cls in ALL]


@pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.__name__)
def test_an_exception_stands_below_its_base_in_the_drawn_tree(cls: type[SamestepError]) -> None:
    tree = drawn_tree()
    if cls is SamestepError:
        assert tree[cls.__name__][0] == 0
        return
    (base,) = cls.__bases__
    assert tree[cls.__name__][0] > tree[base.__name__][0]


@pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.__name__)
def test_the_exit_status_is_the_drawn_one_or_that_of_the_base(cls: type[SamestepError]) -> None:
    _, drawn = drawn_tree()[cls.__name__]
    if drawn:
        assert cls.exit_status == int(drawn)
    else:
        assert cls.exit_status == cls.__bases__[0].exit_status  # type: ignore[attr-defined]


@pytest.mark.parametrize("cls", ALL, ids=lambda cls: cls.__name__)
def test_an_exception_crosses_processes_with_its_message(cls: type[SamestepError]) -> None:
    message = "what happened, the value 3, and what to do\nwith a second line"
    copy = pickle.loads(pickle.dumps(cls(message)))
    assert type(copy) is cls
    assert str(copy) == message
    assert copy.exit_status is cls.exit_status


def test_exit_statuses_are_the_documented_numbers() -> None:
    assert {status.name: int(status) for status in ExitStatus} == {
        "DONE": 0,
        "FAILED": 1,
        "BAD_INPUT": 2,
        "INTERRUPTED": 3,
        "BUDGET_EXHAUSTED": 4,
        "IN_USE": 5,
        "EQUAL_WITHIN_TOLERANCE": 10,
        "DIFFERENT": 11,
        "CANNOT_REPLAY": 12,
    }


def test_every_public_exception_of_the_package_is_in_the_tree() -> None:
    import samestep

    exported = [name for name in samestep.__all__ if name.endswith("Error")]
    assert set(exported) <= {cls.__name__ for cls in ALL}
