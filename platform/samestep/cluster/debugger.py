"""`breakpoint()` in the dataparallel actor reaches the terminal that started the run.

Over loopback only, and only with a secret: the driver listens, the actor dials when a breakpoint is
met, and pdb talks over that connection until the program goes on.
"""

from __future__ import annotations

import contextlib
import pdb
import secrets
import select
import socket
import sys
import threading
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, Final, TextIO

HELLO_TIMEOUT_S: Final = 5.0
POLL_S: Final = 0.1


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where the terminal listens, and what must be said first."""

    host: str
    port: int
    secret: str


class Terminal:
    """The driver's side: relays between the terminal and one debugger at a time."""

    def __init__(self, stdin: TextIO | None = None, stdout: TextIO | None = None) -> None:
        self._stdin = stdin or sys.stdin
        self._stdout = stdout or sys.stdout
        self._server = socket.create_server(("127.0.0.1", 0))
        self._server.settimeout(POLL_S)
        self._closing = threading.Event()
        self._open = threading.Event()
        self.address = Address(
            host=socket.gethostname(),
            port=self._server.getsockname()[1],
            secret=secrets.token_hex(32),
        )
        self._thread = threading.Thread(target=self._serve, name="samestep-terminal", daemon=True)

    @property
    def is_open(self) -> bool:
        """A debugger holds the terminal."""
        return self._open.is_set()

    def __enter__(self) -> Terminal:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._closing.set()
        self._server.close()
        self._thread.join(HELLO_TIMEOUT_S)

    def _serve(self) -> None:
        while not self._closing.is_set():
            try:
                connection, _ = self._server.accept()
            except TimeoutError:
                continue
            except OSError:
                return
            with connection:
                if self._is_ours(connection):
                    self._open.set()
                    try:
                        self._relay(connection)
                    except OSError:
                        pass
                    finally:
                        self._open.clear()

    def _is_ours(self, connection: socket.socket) -> bool:
        connection.settimeout(HELLO_TIMEOUT_S)
        expected = self.address.secret.encode() + b"\n"
        said = b""
        try:
            while len(said) < len(expected):
                part = connection.recv(len(expected) - len(said))
                if not part:
                    return False
                said += part
        except OSError:
            return False
        return secrets.compare_digest(said, expected)

    def _relay(self, connection: socket.socket) -> None:
        sources: list[Any] = [connection, self._stdin]
        while not self._closing.is_set():
            ready, _, _ = select.select(sources, [], [], POLL_S)
            if connection in ready:
                data = connection.recv(65536)
                if not data:
                    return
                self._stdout.write(data.decode(errors="replace"))
                self._stdout.flush()
            if self._stdin in ready:
                line = self._stdin.readline()
                if not line:  # nobody can answer: the program goes on
                    sources = [connection]
                    line = "continue\n"
                connection.sendall(line.encode())


_num_open = 0


def is_open() -> bool:
    """Whether this process stands at a breakpoint whose terminal is connected."""
    return _num_open > 0


class _Wire:
    """File-like ends of the connection, dialled when first used."""

    encoding = "utf-8"

    def __init__(self, address: Address) -> None:
        self._address = address
        self._files: tuple[socket.socket, TextIO, TextIO] | None = None

    def readline(self) -> str:
        """The next line typed; the program goes on when the terminal is gone."""
        try:
            return self._dialled()[1].readline() or "continue\n"
        except OSError:
            return "continue\n"

    def write(self, text: str) -> int:
        """Shows text on the terminal."""
        try:
            self._dialled()[2].write(text)
        except OSError:
            self.close()
        return len(text)

    def flush(self) -> None:
        """Sends what was written."""
        try:
            self._dialled()[2].flush()
        except OSError:
            self.close()

    def close(self) -> None:
        """Gives the terminal back."""
        if self._files is not None:
            global _num_open
            connection, reader, writer = self._files
            self._files = None
            _num_open -= 1
            for file in (writer, reader):
                with contextlib.suppress(OSError):
                    file.close()
            connection.close()

    def _dialled(self) -> tuple[socket.socket, TextIO, TextIO]:
        if self._files is None:
            connection = socket.create_connection(
                ("127.0.0.1", self._address.port), timeout=HELLO_TIMEOUT_S
            )
            connection.settimeout(None)
            connection.sendall(self._address.secret.encode() + b"\n")
            # Two files: one for both would throw away what it has read ahead when it writes.
            reader = connection.makefile("r", encoding="utf-8")
            self._files = (connection, reader, connection.makefile("w", encoding="utf-8"))
            global _num_open
            _num_open += 1
        return self._files


class RemotePdb(pdb.Pdb):
    """pdb whose terminal is elsewhere; it gives the terminal back whenever the program goes on."""

    def __init__(self, address: Address) -> None:
        self._wire = _Wire(address)
        super().__init__(stdin=self._wire, stdout=self._wire, nosigint=True)  # type: ignore[arg-type]

    def set_continue(self) -> None:
        """Goes on."""
        super().set_continue()
        self._wire.close()

    def set_quit(self) -> None:
        """Ends the program at the breakpoint."""
        super().set_quit()
        self._wire.close()


def dial(address: Address) -> None:
    """Makes `breakpoint()` of this process reach a terminal on the same machine."""

    def hook(*_: Any, **__: Any) -> None:
        frame: FrameType | None = sys._getframe(1)
        if socket.gethostname() != address.host:
            refuse("the terminal is on another machine")
        RemotePdb(address).set_trace(frame)

    sys.breakpointhook = hook


def refuse(why: str) -> None:
    """What `breakpoint()` does where no terminal can be reached."""
    raise RuntimeError(
        f"breakpoint() reaches no terminal here ({why}): run with --mode dataparallel on one "
        "machine, or --mode local"
    )


def refuse_breakpoints(why: str) -> None:
    """Makes `breakpoint()` fail with advice instead of reading an empty stdin."""

    def hook(*_: Any, **__: Any) -> None:
        refuse(why)

    sys.breakpointhook = hook
