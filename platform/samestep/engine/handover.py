"""A state sent from the workers that hold it to those that lack it, over the process group."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import starmap
from typing import Any

import torch
from torch import Tensor

from samestep.checkpoint.layout import Layout
from samestep.checkpoint.state import State, flatten, unflatten
from samestep.engine.peers import Peers
from samestep.exact.digest import tensor_bytes

CHUNK_BYTES = 32 << 20


def hand_over(state: State | None, *, holders: Sequence[int], peers: Peers) -> State:
    """Gives every worker the state; all must call it.

    Those that lack it are shared out among the holders. What is received lies in memory of its
    own, laid out as the sender's.

    Args:
        state: of a holder; None elsewhere.
        holders: ranks that have one and the same state.
        peers: the workers.
    """
    lacking = [rank for rank in range(peers.world_size) if rank not in holders]
    if not lacking:
        assert state is not None
        return state
    head: dict[str, Any] = {}
    tensors: dict[str, Tensor] = {}
    if state is not None:
        tensors, text = flatten(state)
        if peers.world_rank == holders[0]:
            head = {"step": state.step, "text": text, "layouts": _layouts(tensors)}
    told = peers.gather(head)()[holders[0]]
    served_by = {rank: holders[place % len(holders)] for place, rank in enumerate(lacking)}
    if state is not None:
        _send(tensors, [r for r in lacking if served_by[r] == peers.world_rank], peers)
        return state
    layouts = {name: _layout(*parts) for name, parts in told["layouts"].items()}
    received = _receive(layouts, served_by[peers.world_rank], peers)
    return unflatten(told["step"], received, json.loads(told["text"]))


def _send(tensors: dict[str, Tensor], to: Sequence[int], peers: Peers) -> None:
    if not to:
        return
    for pieces in chunks([torch.from_numpy(tensor_bytes(tensors[name])) for name in tensors]):
        data = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
        for peer in to:
            peers.give(data, peer)


def _receive(layouts: dict[str, Layout], owner: int, peers: Peers) -> dict[str, Tensor]:
    dense = {
        name: torch.empty(layout.shape, dtype=getattr(torch, layout.dtype))
        for name, layout in layouts.items()
    }
    views = [tensor.view(-1).view(torch.uint8) for tensor in dense.values()]
    for pieces in chunks(views):
        if len(pieces) == 1:
            peers.take(pieces[0], owner)
            continue
        data = torch.empty(sum(map(len, pieces)), dtype=torch.uint8)
        peers.take(data, owner)
        for piece, part in zip(pieces, data.split([len(p) for p in pieces]), strict=True):
            piece.copy_(part)
    return {
        name: tensor if tensor.stride() == layouts[name].strides else layouts[name].copy(tensor)
        for name, tensor in dense.items()
    }


def chunks(views: Sequence[Tensor], size: int = CHUNK_BYTES) -> Iterator[list[Tensor]]:
    """Slices of the 1-dim byte tensors, in order, put together to chunks of at most `size`."""
    chunk: list[Tensor] = []
    room = size
    for view in views:
        start = 0
        while start < len(view):
            piece = view[start : start + room]
            chunk.append(piece)
            start, room = start + len(piece), room - len(piece)
            if not room:
                yield chunk
                chunk, room = [], size
    if chunk:
        yield chunk


def _layouts(tensors: dict[str, Tensor]) -> dict[str, list[Any]]:
    layouts = starmap(lambda name, t: (name, Layout.of(t, name=name)), tensors.items())
    return {
        name: [layout.dtype, list(layout.shape), list(layout.strides)] for name, layout in layouts
    }


def _layout(dtype: str, shape: list[int], strides: list[int]) -> Layout:
    return Layout(dtype=dtype, shape=tuple(shape), strides=tuple(strides))
