"""The run's recorder as a Ray actor, and the way to it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from samestep.errors import RecorderError, SamestepError
from samestep.names import THREAD_SIGTERM
from samestep.telemetry.sinks import SinkPlan, open_recorder

NAMESPACE: Final = "samestep"
CALL_TIMEOUT_S: Final = 60.0
OPEN_TIMEOUT_S: Final = 120.0
UNLIMITED: Final = -1
"""Restarts of the recorder. One that dies at every call is bounded by those who call it, who give
up after a minute in which none got through; a number would bound the length of a run instead."""
LEAVE_S: Final = 1.0


class RecorderHost:
    """Holds the recorder in the actor's process; opens it at the first call.

    So an error in opening reaches the caller as it is, and an actor that Ray restarted opens it
    again and goes on. SIGTERM ends the process within a second or two: what was acknowledged is in
    the ledger already, and the run is given back, so that whoever goes on with it on another
    machine need not wait for the lease to grow old.
    """

    def __init__(self, plan: SinkPlan, run_uri: str, run: str, spec_yaml: str) -> None:
        self._arguments = (plan, run_uri, run, spec_yaml)
        self._recorder: Any = None
        self._lock = threading.Lock()
        at_sigterm(self._leave)

    def call(self, method: str, args: list[Any]) -> Any:
        """Calls a method of the recorder.

        Args:
            method: its name.
            args: a list, since Ray writes lists of plain data as such; a tuple is pickled.
        """
        with self._lock:
            if self._recorder is None:
                plan, run_uri, run, spec_yaml = self._arguments
                os.environ.update(plan.environment)
                self._recorder = open_recorder(
                    plan,
                    run_uri,
                    run=run,
                    spec_yaml=spec_yaml,
                    returning=ray.get_runtime_context().was_current_actor_reconstructed,
                )
            return getattr(self._recorder, method)(*args)

    def _leave(self) -> None:
        """Gives the run back, unless a call does not end in time, and ends this process."""
        with suppress(Exception):  # storage may be away; the lease then grows old
            if self._lock.acquire(timeout=LEAVE_S) and self._recorder is not None:
                self._recorder.leave(LEAVE_S)
        os._exit(1)  # not 0: Ray starts the actor again where its driver lives


def at_sigterm(action: Callable[[], None]) -> None:
    """Lets a thread of its own act on SIGTERM; for an actor's constructor.

    Ray's handler waits until its own code lets the main thread go on, for seconds on a busy
    machine, and raises there, perhaps in the middle of a call.
    """
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.signal(signal.SIGTERM, lambda *_: None)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)

    def wait() -> None:
        while signal.SIGTERM not in os.read(read, 64):
            continue
        action()

    threading.Thread(target=wait, name=THREAD_SIGTERM, daemon=True).start()


class RayTarget:
    """The recorder's actor as a `telemetry.link.Target`; can be sent to workers."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def call(self, method: str, *args: Any) -> Any:
        """Calls the recorder; its own exceptions are raised as they are.

        Raises:
            RecorderError: the recorder's own refusal.
            ConnectionError: its actor is away.
            TimeoutError: it did not answer in time.
        """
        try:
            return ray.get(self._actor.call.remote(method, list(args)), timeout=CALL_TIMEOUT_S)
        except ray.exceptions.RayTaskError as error:
            raise _cause(error) from None
        except ray.exceptions.GetTimeoutError as error:
            raise TimeoutError(f"the recorder did not answer {method} in time") from error
        except ray.exceptions.RayError as error:
            raise ConnectionError(f"the recorder is away: {error}") from error


def start_recorder(plan: SinkPlan, run_uri: str, run: str, spec_yaml: str) -> tuple[Any, RayTarget]:
    """Starts the run's recorder on this node and opens the run.

    Raises:
        RunInUseError: a live run holds the run directory.
        SamestepError: the run directory can't be used.
    """
    here = ray.get_runtime_context().get_node_id()
    actor: Any = (
        ray.remote(RecorderHost)
        .options(
            num_cpus=0,
            max_restarts=UNLIMITED,
            # Never elsewhere, as Ray may choose when this node is slow to answer: beside a worker
            # it would go with that worker's node, and live on behind a cut link, lease in hand.
            scheduling_strategy=NodeAffinitySchedulingStrategy(here, soft=False),
        )
        .remote(plan, run_uri, run, spec_yaml)
    )
    target = RayTarget(actor)
    try:
        ray.get(actor.call.remote("status", []), timeout=OPEN_TIMEOUT_S)
    except ray.exceptions.RayTaskError as error:
        raise _cause(error) from None
    except ray.exceptions.RayError as error:
        raise RecorderError(f"the recorder could not be started: {error}") from error
    return actor, target


def close_recorder(actor: Any, target: RayTarget) -> None:
    """Gives the lease back and ends the actor; never raises."""
    for action in (lambda: target.call("close"), lambda: ray.kill(actor)):
        _quietly(action)


def _quietly(action: Callable[[], Any]) -> None:
    try:
        action()
    except Exception:  # the cluster may be gone already; nothing is left to do then
        return


def _cause(error: ray.exceptions.RayTaskError) -> Exception:
    cause = error.cause
    return cause if isinstance(cause, SamestepError) else error
