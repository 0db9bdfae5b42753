"""Where the exact engine's time goes: calls are timed, less the calls inside them."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from contenders import Samestep

from samestep.engine import update
from samestep.engine.step import StepEngine

REST = "rest of the step"


class Stopwatch:
    """Adds up seconds by label; wrapped calls may nest."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._inner: list[float] = []

    def wrap(self, owner: Any, name: str, label: str) -> None:
        """Times every call of `owner.name` from now on."""
        setattr(owner, name, self.timed(getattr(owner, name), label))

    def timed(self, function: Callable[..., Any], label: str) -> Callable[..., Any]:
        """The function, timed."""

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            self._inner.append(0.0)
            try:
                return function(*args, **kwargs)
            finally:
                elapsed = time.perf_counter() - started
                own = elapsed - self._inner.pop()
                self.seconds[label] = self.seconds.get(label, 0.0) + own
                if self._inner:
                    self._inner[-1] += elapsed

        return call


def watch(contender: Samestep) -> tuple[Stopwatch, Callable[[int], object]]:
    """The exact engine's step with a stopwatch on its parts, which slows it a little."""
    engine = contender.engine
    assert isinstance(engine, StepEngine)
    stopwatch = Stopwatch()
    buckets, exchange = engine.main.buckets, engine.exchange
    optimizer, peers = contender.built.parts.optimizer, engine.peers
    for owner, name, label in (
        (engine, "forward", "forward"),
        (engine, "backward", "backward, and filling the buckets"),
        (engine.main.keeper, "start_step", "buffers"),
        (engine.main.keeper, "start_shard", "buffers"),
        (engine.main.keeper, "keep", "buffers"),
        (engine, "_settle_buffers", "buffers"),
        (buckets, "start_step", "gradients made ready"),
        (buckets, "start_shard", "gradients made ready"),
        (buckets, "end_shard", "partial sums"),
        (buckets, "_push", "partial sums"),
        (buckets, "publish", "gradients published"),
        (exchange, "post", "receives posted"),
        (exchange, "send", "sums sent (phase 1)"),
        (exchange, "complete", "tree finished, slices sent (phase 2)"),
        (optimizer, "step", "optimizer"),
    ):
        stopwatch.wrap(owner, name, label)
    if hasattr(exchange, "_wait"):
        stopwatch.wrap(exchange, "_wait", "waiting for the exchange")
    gather = peers.gather

    def watched_gather(message: Any) -> Callable[[], list[Any]]:
        started = stopwatch.timed(gather, "small talk")(message)
        return stopwatch.timed(started, "small talk")

    peers.gather = watched_gather  # type: ignore[method-assign]
    norm = update.global_norm

    def step(number: int) -> object:
        update.global_norm = stopwatch.timed(norm, "gradient norm")
        try:
            return stopwatch.timed(contender.step, REST)(number)
        finally:
            update.global_norm = norm

    return stopwatch, step
