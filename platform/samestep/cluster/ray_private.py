"""What we change in Ray's face to the driver: its trainer, and how workers' lines are shown.

Only this module and its siblings `ray_private_*` touch Ray's private interfaces; each interface
has a test that fails when it moves. Checked with Ray 2.60.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

from ray._common.constants import RAY_WARN_BLOCKING_GET_INSIDE_ASYNC_ENV_VAR
from ray._private.ray_logging import global_worker_stdstream_dispatcher
from ray.train import Checkpoint, Result
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import (
    PlacementGroupCleanerCallback,
)
from ray.train.v2._internal.constants import (
    DEFAULT_RAY_WARN_BLOCKING_GET_INSIDE_ASYNC_VALUE,
    get_env_vars_to_propagate,
)

from samestep.checkpoint.storage import Storage
from samestep.cluster.links import NETWORK
from samestep.cluster.newest import newest_checkpoint
from samestep.cluster.ray_private_control import Plan, run_controller
from samestep.errors import SamestepError

WORKER_ACTORS: Final = ("SteadyWorker", "Trainer")
RAY_HANDLER: Final = "ray_print_logs"
OUR_HANDLER: Final = "samestep"
RAY_TRAIN_LINES: Final = ("Setting up process group for:",)


class ElasticTorchTrainer(TorchTrainer):
    """TorchTrainer with a controller of our own, and without two callbacks.

    The placement group cleaner asks the dashboard every second, which a local cluster does not
    have, and says so each time; when a controller dies Ray removes its groups itself. Ray Data is
    not used.

    Args:
        plan: for the controller.
    """

    def __init__(self, *args: Any, plan: Plan, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._plan = plan

    def _create_default_callbacks(self) -> list[Any]:
        dropped = (PlacementGroupCleanerCallback, DatasetsCallback)
        made = super()._create_default_callbacks()  # type: ignore[misc]
        return [cb for cb in made if not isinstance(cb, dropped)]

    def _initialize_and_run_controller(self, **controller_init_kwargs: Any) -> Any:
        variables = get_env_vars_to_propagate()
        variables.setdefault(
            RAY_WARN_BLOCKING_GET_INSIDE_ASYNC_ENV_VAR,
            DEFAULT_RAY_WARN_BLOCKING_GET_INSIDE_ASYNC_VALUE,
        )
        for replaced in ("scaling_policy", "failure_policy"):
            controller_init_kwargs.pop(replaced)
        result = run_controller(self._plan, controller_init_kwargs, variables)
        return with_checkpoint(result, self._plan.part.run_uri)


def with_checkpoint(result: Result, run_uri: str) -> Result:
    """Ray Train's result with the run's newest checkpoint, which stays where it lies.

    The workers report none to Ray: `ray.train.report` has all of them wait for each other and for
    the controller, keeps books of its own that can end a run, and adds nothing to what is here. A
    run that stopped as planned, or at its end, has just committed its last state.
    """
    with suppress(SamestepError):  # the run is over, whether it can be looked at or not
        newest = newest_checkpoint(Storage.at(run_uri))
        if newest is not None:
            result.checkpoint = Checkpoint(newest.root, filesystem=newest.filesystem)
    return result


def own_address(cluster: str) -> dict[str, Any]:
    """Arguments of `ray.init` that say which node this process is on.

    Needed where several nodes share a machine (`nodes`): Ray looks for a node that has the
    machine's own address, and there each has another.

    Args:
        cluster: "host:port" of the head.
    """
    host = cluster.rpartition(":")[0]
    is_loopback = host.startswith("127.") and host != "127.0.0.1"
    is_of_nodes = is_loopback or host.startswith(f"{NETWORK}.")
    return {"_node_ip_address": host} if is_of_nodes else {}


@contextmanager
def worker_output_to(show: Callable[[str], None]) -> Iterator[None]:
    """Gives the lines that workers print to `show`, each once, instead of Ray's own printing.

    What Ray's controller and helper actors print stays in the files of Ray's session.
    """

    def handle(data: dict[str, Any]) -> None:
        if data.get("actor_name") not in WORKER_ACTORS:
            return
        for line in data["lines"]:
            text = str(line)
            if text.strip() and not any(known in text for known in RAY_TRAIN_LINES):
                show(f"[worker pid={data['pid']}] {text}")

    global_worker_stdstream_dispatcher.remove_handler(RAY_HANDLER)
    global_worker_stdstream_dispatcher.add_handler(OUR_HANDLER, handle)
    try:
        yield
    finally:
        global_worker_stdstream_dispatcher.remove_handler(OUR_HANDLER)
