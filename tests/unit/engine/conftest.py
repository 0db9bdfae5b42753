from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

# Test modules and the processes of the pool share the modules beside this one.
sys.path.insert(0, str(Path(__file__).resolve().parent))

from pool import Pool, gathered


@pytest.fixture(scope="session")
def pool_of_session() -> Iterator[Pool]:
    # A short path: the name of a socket has at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="pool-") as folder:
        pool = Pool(Path(folder))
        pool.start()
        yield pool
        pool.close()


@pytest.fixture
def pool(pool_of_session: Pool) -> Pool:
    return pool_of_session


RunTask = Callable[..., Any]


@pytest.fixture
def results(pool: Pool) -> RunTask:
    """results("engine", 3, **arguments): the answers of three workers; fails if one raised."""

    def run(name: str, world_size: int = 1, **arguments: Any) -> list[Any]:
        found = []
        for kind, value in gathered(pool, name, world_size, **arguments):
            if kind == "raised":
                pytest.fail(value[2], pytrace=False)
            found.append(value)
        return found

    return run


@pytest.fixture
def failures(pool: Pool) -> RunTask:
    """The same; gives (class, message) of what each worker raised, and fails if one did not."""

    def run(name: str, world_size: int = 1, **arguments: Any) -> list[tuple[str, str]]:
        answers = gathered(pool, name, world_size, **arguments)
        if any(kind != "raised" for kind, _ in answers):
            pytest.fail(f"expected every worker to raise: {answers}", pytrace=False)
        return [(value[0], value[1]) for _, value in answers]

    return run
