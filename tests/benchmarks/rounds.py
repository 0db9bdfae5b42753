"""Alternating rounds: in each, every engine takes one step, in an order that changes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch.distributed as dist
from contenders import Contender

WARM_UP_ROUNDS = 5

Times = dict[str, list[float | None]]
"""Seconds by name of the engine, one per round; None where it was left out."""


def alternate(
    contenders: Sequence[Contender], num_rounds: int, *, warm_up: int = WARM_UP_ROUNDS
) -> dict[str, Times]:
    """Times one step of each engine per round, all workers at once.

    Every step starts from a barrier. Its wall time is that of the slowest worker, its CPU time
    that of all workers and all their threads.

    Returns:
        `wall_s` and `cpu_s`: by name of the engine, one per round, the same on all workers.
    """
    wall: Times = {contender.name: [] for contender in contenders}
    cpu: Times = {contender.name: [] for contender in contenders}
    for number in range(warm_up + num_rounds):
        for contender in _turned(contenders, number):
            if number >= warm_up and number % contender.every != contender.turn:
                wall[contender.name].append(None)
                cpu[contender.name].append(None)
                continue
            dist.barrier()
            started, cpu_started = time.perf_counter(), time.process_time()
            if contender.takes_part:
                contender.step(number)
            elapsed, used = time.perf_counter() - started, time.process_time() - cpu_started
            contender.settle()
            if number >= warm_up:
                wall[contender.name].append(elapsed)
                cpu[contender.name].append(used)
    dist.barrier()
    return {"wall_s": _over_workers(wall, max), "cpu_s": _over_workers(cpu, sum)}


def _over_workers(own: Times, combine: Callable[[Sequence[float]], float]) -> Times:
    everyone: list[Times] = [{}] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return {
        name: [
            None if times[0] is None else combine(times)
            for times in zip(*(other[name] for other in everyone), strict=True)
        ]
        for name in own
    }


def _turned(contenders: Sequence[Contender], number: int) -> list[Contender]:
    """Each engine is at each place, and before and after each other, equally often."""
    start = number // 2 % len(contenders)
    turned = [*contenders[start:], *contenders[:start]]
    return turned if number % 2 == 0 else turned[::-1]
