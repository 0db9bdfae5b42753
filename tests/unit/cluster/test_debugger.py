"""A breakpoint in another process reaches the terminal, and only with the secret."""

from __future__ import annotations

import io
import os
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from samestep.cluster.debugger import Terminal, refuse_breakpoints

PROGRAM = """
    import sys
    from samestep.cluster.debugger import Address, dial

    dial(Address(host={host!r}, port={port}, secret={secret!r}))
    total = 0
    for step in range(3):
        if step == {at}:
            breakpoint()
        total += step
    print("total", total)
"""


def run_with_breakpoint(typed: str, *, secret: Callable[[str], str] = str) -> tuple[str, str]:
    """What the terminal showed, and what the program printed, when `typed` was typed."""
    shown = io.StringIO()
    reader, writer = os.pipe()
    os.write(writer, typed.encode())
    os.close(writer)
    with os.fdopen(reader) as stdin, Terminal(stdin=stdin, stdout=shown) as terminal:
        address = terminal.address
        code = textwrap.dedent(PROGRAM).format(
            host=address.host, port=address.port, secret=secret(address.secret), at=1
        )
        result = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[3] / "platform")},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    return shown.getvalue(), result.stdout + result.stderr


def test_pdb_answers_on_the_terminal_and_the_program_goes_on() -> None:
    shown, printed = run_with_breakpoint("p step, total + 40\ntotal = 100\ncontinue\n")
    assert "(Pdb)" in shown
    assert "(1, 40)" in shown
    assert "total 103" in printed


def test_where_nobody_can_answer_the_program_goes_on() -> None:
    _, printed = run_with_breakpoint("")
    assert "total 3" in printed


def test_whoever_does_not_know_the_secret_gets_no_terminal() -> None:
    shown, printed = run_with_breakpoint("total = 100\ncontinue\n", secret=lambda s: s[::-1])
    assert shown == ""
    assert "total 3" in printed


def test_a_connection_that_says_nothing_does_not_hold_the_terminal_up() -> None:
    with Terminal(stdin=io.StringIO(), stdout=io.StringIO()) as terminal:
        with socket.create_connection(("127.0.0.1", terminal.address.port)):
            pass
        assert not terminal.is_open
    assert not any(thread.name == "samestep-terminal" for thread in threading.enumerate())


def test_a_worker_of_several_refuses_a_breakpoint_with_advice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "breakpointhook", sys.breakpointhook)
    refuse_breakpoints("this is one of several workers")
    with pytest.raises(RuntimeError, match=r"one of several workers\): run with --mode datapara"):
        breakpoint()
