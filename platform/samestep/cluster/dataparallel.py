"""Mode dataparallel: one actor on one node, shards on its GPUs or in turn on the CPU.

For debugging on a single node: no process group, one process, breakpoints work.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import ray

from samestep.cluster.debugger import Terminal, dial, is_open
from samestep.cluster.folders import Desk, Folders, at_desk
from samestep.cluster.judge import Judge
from samestep.cluster.monitor import POLL_S, Monitor
from samestep.cluster.notes import Notes
from samestep.cluster.placement import actor_resources
from samestep.cluster.ray_private_faults import fault_of_dead
from samestep.spec import JobSpec, dump_spec, parse_spec
from samestep.telemetry.link import Patient

if TYPE_CHECKING:
    from samestep.cluster.actors import RayTarget
    from samestep.cluster.launch import Order
    from samestep.cluster.session import Session
    from samestep.engine.ending import Ending


class Trainer:
    """The actor's class."""

    def run(self, config: dict[str, Any]) -> None:
        """Trains on all devices that Ray gave this actor."""
        from samestep.engine.ending import Ending

        ending = Ending.ROLLED_BACK
        while ending is Ending.ROLLED_BACK:
            with at_desk(config, world_rank=0, world_size=1) as desk:
                ending = self._attempt(config, desk)

    def _attempt(self, config: dict[str, Any], desk: Desk) -> Ending:
        import torch
        import yaml

        from samestep.engine.attempt import Place, run_attempt
        from samestep.engine.peers import Peers
        from samestep.telemetry.mlflow_model import model_keeper

        spec: JobSpec = parse_spec(yaml.safe_load(config["spec"]))
        devices = [torch.device("cpu")]
        if spec.resources.gpu:
            devices = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
        devices = devices[: spec.shards]
        target = config["target"]
        Patient(target).call(
            "say",
            f"dataparallel on {', '.join(map(str, devices))}: {spec.shards} shards, "
            + ("one device after another" if len(devices) > 1 else "in turn"),
        )
        dial(config["terminal"])
        return run_attempt(
            spec,
            Place(
                mode="dataparallel",
                devices=devices,
                peers=Peers(None),
                group=None,
                search=desk.search,
                files=desk.files,
                run_uri=config["run_uri"],
                target=target,
                is_debugged=is_open,
                on_finished=(
                    model_keeper(config["run_uri"], partial(target.call, "say"))
                    if config["tracked"]
                    else None
                ),
            ),
        )


def run(
    order: Order, session: Session, target: RayTarget, monitor: Monitor, terminal: Terminal
) -> str | None:
    """Trains in one actor, started again when its process dies.

    Args:
        order: what to run.
        session: the connection to Ray.
        target: the recorder.
        monitor: polled while waiting.
        terminal: where `breakpoint()` leads.

    Returns:
        What went wrong, or None.
    """
    spec = order.spec
    resources = actor_resources(spec)
    config = {
        "spec": dump_spec(spec),
        "run_uri": order.run_uri,
        "folders": Folders.of_command(order.search, is_copied=session.is_copied),
        "target": target,
        "terminal": terminal.address,
        "tracked": order.plan.tracking_uri is not None,
    }
    notes = Notes(target)
    judge = Judge(spec.faults.retries, notes)
    pause = threading.Event()
    try:
        while True:
            remote: Any = ray.remote(Trainer).options(
                num_cpus=resources["CPU"], num_gpus=resources.get("GPU", 0)
            )
            actor = remote.remote()
            try:
                pending = [actor.run.remote(config)]
                while pending:
                    done, pending = ray.wait(pending, timeout=POLL_S)
                    monitor.pause() if terminal.is_open else monitor.poll()
                ray.get(done)
                return None
            except ray.exceptions.RayTaskError as error:
                return str(error)
            except ray.exceptions.RayError as error:
                status = Patient(target).call("status")
                fault = fault_of_dead(error, "the training process")
                step, attempt = int(status["step"]), int(status["attempt"])
                verdict = judge.decide([replace(fault, step=step, attempt=attempt)], [])
                if not verdict.retry:
                    return verdict.message
                pause.wait(verdict.delay_s)
            finally:
                ray.kill(actor)
    finally:
        notes.close()
