"""Carries a run out on Ray: session, mode, recorder, workers, outcome."""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from samestep.checkpoint.storage import Storage
from samestep.cluster import dataparallel, ddp
from samestep.cluster.actors import RayTarget, close_recorder, start_recorder
from samestep.cluster.budget import BudgetWatch
from samestep.cluster.debugger import Terminal
from samestep.cluster.leftovers import forget_on_all_nodes
from samestep.cluster.monitor import POLL_S, Monitor
from samestep.cluster.placement import settle_mode
from samestep.cluster.ray_private import worker_output_to
from samestep.cluster.session import Session, ray_session
from samestep.errors import RecorderError
from samestep.names import Tag
from samestep.spec import Mode, dump_spec
from samestep.telemetry.link import Patient

if TYPE_CHECKING:
    from samestep.cluster.launch import Observer, Order

logger = logging.getLogger(__name__)


def run_on_ray(order: Order, observer: Observer) -> dict[str, Any]:
    """Runs in mode ddp or dataparallel; returns the run's result."""
    from samestep.cluster.launch import finish_if_open

    spec = order.spec
    observer({"output": "starting Ray and its workers (some seconds) ...", "messages": []})
    with (
        ray_session(spec) as session,
        worker_output_to(lambda line: observer({"output": line, "messages": []})),
    ):
        mode, why = settle_mode(spec, session, no_fallback=order.no_fallback)
        order = replace(order, spec=spec.model_copy(update={"mode": mode}))
        where = {**order.plan.about, str(Tag.CLUSTER): session.address}
        plan = replace(order.plan, about=where)
        # The run keeps the spec as it was given; a mode that was settled here is no part of it.
        actor, target = start_recorder(plan, order.run_uri, order.name, dump_spec(spec))
        try:
            for note in [*session.notes, *([why] if why else [])]:
                target.call("say", note)
            budget = BudgetWatch(Storage.at(order.run_uri), spec.budget)
            monitor = Monitor(target, observer, budget)
            with monitor.signals():
                if mode is Mode.DDP:
                    failure = _fit(order, session, target, monitor)
                else:
                    with Terminal() as terminal:
                        failure = dataparallel.run(order, session, target, monitor, terminal)
            monitor.poll()
            result = finish_if_open(Patient(target), failure)
            with suppress(RecorderError, OSError):  # what is not delivered waits in the ledger
                target.call("drain")
            monitor.poll()
            forget_on_all_nodes(order.run_uri)
            return result
        finally:
            close_recorder(actor, target)


def _fit(order: Order, session: Session, target: RayTarget, monitor: Monitor) -> str | None:
    """`fit` in a thread, so that this one can act on signals."""
    ended: list[str | None] = []
    errors: list[BaseException] = []

    def fit() -> None:
        try:
            ended.append(ddp.fit(order, session, target))
        except BaseException as error:  # told by the main thread
            errors.append(error)

    thread = threading.Thread(target=fit, name="samestep-fit", daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(POLL_S)
        monitor.poll()
    if errors:
        raise errors[0]
    return ended[0]
