"""Mode local: the caller's own process, no Ray; for replay, notebooks and tests."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from samestep.checkpoint.storage import Storage
from samestep.cluster.budget import BudgetWatch
from samestep.cluster.monitor import Monitor
from samestep.exact import numerics
from samestep.spec import dump_spec
from samestep.telemetry.link import InProcess
from samestep.telemetry.sinks import open_recorder

if TYPE_CHECKING:
    from samestep.cluster.launch import Observer, Order


def run_local(order: Order, observer: Observer) -> dict[str, Any]:
    """Trains in this process and thread; returns the run's result.

    Settings of torch, generators and the environment are put back afterwards. Where torch was
    loaded before, some settings come too late: the run says which.
    """
    spec = order.spec
    late = numerics.settings_not_in_force(spec) if "torch" in sys.modules else []
    if not late:
        os.environ.update(numerics.environment(spec))
    import torch

    from samestep.cluster.launch import finish_if_open
    from samestep.engine.attempt import Place, run_attempt
    from samestep.engine.ending import Ending
    from samestep.engine.peers import Peers
    from samestep.exact.seeds import global_generators_kept
    from samestep.telemetry.logs import worker_files
    from samestep.telemetry.mlflow_model import model_keeper

    recorder = open_recorder(order.plan, order.run_uri, run=order.name, spec_yaml=dump_spec(spec))
    target = InProcess(recorder)
    for line in late:
        target.call("say", line)
    device = torch.device("cuda", torch.cuda.current_device()) if spec.resources.gpu else None
    run = Storage.at(order.run_uri)
    monitor = Monitor(target, observer, BudgetWatch(run, spec.budget))
    place = Place(
        mode="local",
        devices=[device or torch.device("cpu")],
        peers=Peers(None),
        group=None,
        search=list(order.search),
        run_uri=order.run_uri,
        target=target,
        on_finished=(
            model_keeper(order.run_uri, recorder.say) if order.plan.tracking_uri else None
        ),
    )
    try:
        with (
            numerics.GlobalsKept(),
            global_generators_kept(),
            monitor.signals(),
            monitor.polling(),
        ):
            ending = Ending.ROLLED_BACK
            while ending is Ending.ROLLED_BACK:
                attempt = int(target.call("status")["attempt"]) + 1
                with worker_files(run, attempt=attempt, world_rank=0) as files:
                    ending = run_attempt(spec, replace(place, files=files))
            result = finish_if_open(target, None)
            recorder.drain()
            return result
    finally:
        recorder.close()
