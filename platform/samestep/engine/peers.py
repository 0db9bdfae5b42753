"""Small talk between workers: bytes gathered in pairs, and buffers sent round by their owner."""

from __future__ import annotations

import json
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.engine.exchange import PeerErrors, message_limit
from samestep.errors import PeerLostError

TALK_TAG = 1 << 21
REST_TAG = TALK_TAG + 1
SPREAD_TAG = TALK_TAG + 2
GIVE_TAG = TALK_TAG + 3
FIRST_BYTES = 4096
_LENGTH = struct.Struct("<Q")


class Peers:
    """The other workers of the group, or none.

    Every worker must make the same calls in the same order. Waits are bounded by the group's
    timeout; a failure raises PeerLostError naming the worker.

    Args:
        group: a process group that takes CPU tensors (gloo); None for a single worker.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self._limit = message_limit(group) if group else timedelta(0)
        self.world_rank = dist.get_rank(group) if group else 0
        self.world_size = dist.get_world_size(group) if group else 1
        self.wait_s = 0.0
        """Seconds spent so far in waiting for others' messages."""
        self._others = [r for r in range(self.world_size) if r != self.world_rank]

    def gather(self, message: Any) -> Callable[[], list[Any]]:
        """Starts to send a JSON-able message to all; the result waits for those of all.

        Floats come out with the bits they went in with (NaN as one NaN).
        """
        if self._group is None:
            return lambda: [message]
        data = json.dumps(message).encode()
        room = FIRST_BYTES - _LENGTH.size
        head = _padded(_LENGTH.pack(len(data)) + data[:room])
        rest = torch.frombuffer(bytearray(data[room:] or b"\0"), dtype=torch.uint8)
        heads = {peer: torch.empty(FIRST_BYTES, dtype=torch.uint8) for peer in self._others}
        works = [(p, self._irecv(heads[p], p, TALK_TAG)) for p in self._others]
        sends = [(p, self._isend(head, p, TALK_TAG)) for p in self._others]
        if len(data) > room:
            sends += [(p, self._isend(rest, p, REST_TAG)) for p in self._others]

        def wait() -> list[Any]:
            started = time.perf_counter()
            messages: dict[int, Any] = {self.world_rank: message}
            for peer, work in works:
                self._wait(work, peer)
                messages[peer] = self._read(heads[peer], peer)
            for peer, work in sends:
                # What the others said may tell why one of them is gone already; the next call
                # finds it missing.
                with suppress(PeerLostError):
                    self._wait(work, peer)
            self.wait_s += time.perf_counter() - started
            return [messages[rank] for rank in range(self.world_size)]

        return wait

    def spread(self, tensor: Tensor, owner: int) -> None:
        """Overwrites a CPU tensor by the owner's."""
        if self._group is None:
            return
        if owner == self.world_rank:
            for peer, work in [(p, self._isend(tensor, p, SPREAD_TAG)) for p in self._others]:
                self._wait(work, peer)
        else:
            self._wait(self._irecv(tensor, owner, SPREAD_TAG), owner)

    def give(self, data: Tensor, peer: int) -> None:
        """Sends a CPU tensor to one worker, which must `take` one of the same size."""
        self._wait(self._isend(data, peer, GIVE_TAG), peer)

    def take(self, data: Tensor, owner: int) -> None:
        """Overwrites a CPU tensor by what another worker gives."""
        self._wait(self._irecv(data, owner, GIVE_TAG), owner)

    def _read(self, head: Tensor, peer: int) -> Any:
        raw = head.numpy().tobytes()
        (length,) = _LENGTH.unpack_from(raw)
        data = raw[_LENGTH.size : _LENGTH.size + length]
        if length > len(data):
            rest = torch.empty(length - len(data), dtype=torch.uint8)
            self._wait(self._irecv(rest, peer, REST_TAG), peer)
            data += rest.numpy().tobytes()
        return json.loads(data)

    def _isend(self, tensor: Tensor, peer: int, tag: int) -> Any:
        with PeerErrors(peer):
            return dist.isend(tensor, group=self._group, tag=tag, group_dst=peer)

    def _irecv(self, tensor: Tensor, peer: int, tag: int) -> Any:
        with PeerErrors(peer):
            return dist.irecv(tensor, group=self._group, tag=tag, group_src=peer)

    def _wait(self, work: Any, peer: int) -> None:
        with PeerErrors(peer):
            work.wait(self._limit)


def _padded(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data.ljust(FIRST_BYTES, b"\0")), dtype=torch.uint8)
