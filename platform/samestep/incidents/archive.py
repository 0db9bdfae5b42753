"""An uncompressed zip archive whose bytes follow from names and contents alone.

The standard library's writer may lay out the same content otherwise in another version; what is
written here is compared byte for byte when it is read. Every size is told in 64 bits, whether it
needs them or not. See APPNOTE.TXT 6.3.10, sections 4.3 and 4.5.3.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from typing import Any, Final, Protocol

MODE: Final = 0o100644 << 16
"""External attributes of every member: a plain file."""
SYSTEM_UNIX: Final = 3

_VERSION: Final = 45
_SIZES_FOLLOW: Final = 0x0008
_TIME, _DATE = 0, 0x0021  # 1980-01-01
_IN_EXTRA: Final = 0xFFFF_FFFF


class Sink(Protocol):
    """Where an archive goes."""

    def write(self, data: Any, /) -> object: ...  # noqa: D102


class Archive:
    """Writes members one after another, then `close`.

    Args:
        sink: where to; never asked to go back.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._position = 0
        self._directory: list[bytes] = []

    def add(self, name: str, num_bytes: int, parts: Iterable[bytes]) -> None:
        """Adds a member.

        Args:
            name: in ASCII, with slashes.
            num_bytes: of all parts together.
            parts: its content.

        Raises:
            ValueError: the parts have another size.
        """
        offset, path, crc, left = self._position, name.encode("ascii"), 0, num_bytes
        sizes = struct.pack("<HHQQ", 1, 16, num_bytes, num_bytes)
        head = (_VERSION, _SIZES_FOLLOW, 0, _TIME, _DATE)
        self._write(
            struct.pack("<4s5H3I2H", b"PK\x03\x04", *head, 0, _IN_EXTRA, _IN_EXTRA, len(path), 20)
        )
        self._write(path + sizes)
        for part in parts:
            crc, left = zlib.crc32(part, crc), left - len(part)
            self._write(part)
        if left:
            raise ValueError(f"{name} has {num_bytes - left} bytes, and should have {num_bytes}")
        self._write(struct.pack("<4sIQQ", b"PK\x07\x08", crc, num_bytes, num_bytes))
        made_by = SYSTEM_UNIX << 8 | _VERSION
        self._directory.append(
            struct.pack("<4s6H", b"PK\x01\x02", made_by, *head)
            + struct.pack("<3I3H", crc, _IN_EXTRA, _IN_EXTRA, len(path), 28, 0)
            + struct.pack("<2H2I", 0, 0, MODE, _IN_EXTRA)
            + path
            + struct.pack("<HHQQQ", 1, 24, num_bytes, num_bytes, offset)
        )

    def close(self) -> None:
        """Writes the directory."""
        start, num_members = self._position, len(self._directory)
        for entry in self._directory:
            self._write(entry)
        end = self._position
        counts = (num_members, num_members, end - start, start)
        self._write(struct.pack("<4sQ2H2I4Q", b"PK\x06\x06", 44, _VERSION, _VERSION, 0, 0, *counts))
        self._write(struct.pack("<4sIQI", b"PK\x06\x07", 0, end, 1))
        self._write(
            struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 0xFFFF, 0xFFFF, _IN_EXTRA, _IN_EXTRA, 0)
        )

    def _write(self, data: bytes) -> None:
        self._sink.write(data)
        self._position += len(data)
