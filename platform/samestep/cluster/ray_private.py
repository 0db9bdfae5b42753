"""The only module that touches Ray's private interfaces; each has a test that fails when it moves.

Checked with Ray 2.60.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from ray._private.ray_logging import global_worker_stdstream_dispatcher
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import (
    PlacementGroupCleanerCallback,
)

WORKER_ACTORS: Final = ("RayTrainWorker", "Trainer")
RAY_HANDLER: Final = "ray_print_logs"
OUR_HANDLER: Final = "samestep"
RAY_TRAIN_LINES: Final = ("Setting up process group for:",)


class ExactTorchTrainer(TorchTrainer):
    """TorchTrainer without two callbacks that we have no use for.

    The placement group cleaner asks the dashboard every second, which a local cluster does not
    have, and says so each time; when a controller dies Ray removes its groups itself. Ray Data is
    not used.
    """

    def _create_default_callbacks(self) -> list[Any]:
        dropped = (PlacementGroupCleanerCallback, DatasetsCallback)
        made = super()._create_default_callbacks()  # type: ignore[misc]
        return [cb for cb in made if not isinstance(cb, dropped)]


def own_address(cluster: str) -> dict[str, Any]:
    """Arguments of `ray.init` that say which node this process is on.

    Needed where several nodes share a machine: Ray looks for a node that has the machine's own
    address, and there each has a loopback address.

    Args:
        cluster: "host:port" of the head.
    """
    host = cluster.rpartition(":")[0]
    is_loopback = host.startswith("127.") and host != "127.0.0.1"
    return {"_node_ip_address": host} if is_loopback else {}


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
