"""What a worker process does once before it is needed: all that is slow the first time.

Imports, the first file system, the first call of the recorder, the first process group, the
first backward: together they take seconds, in which the survivors of a group would wait.
"""

from __future__ import annotations

import importlib
import logging
import sys
from dataclasses import dataclass
from typing import Any

from samestep.cluster.folders import Folders

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Part:
    """What there is to rehearse with.

    Attributes:
        spec: the job, as YAML.
        run_uri: the run directory.
        folders: of the command.
        target: the run's recorder.
    """

    spec: str
    run_uri: str
    folders: Folders
    target: Any


def rehearse(part: Part) -> None:
    """Leaves nothing behind but warm modules; what fails here is told when it counts."""
    import torch
    import torch._dynamo
    import torch.distributed as dist
    import yaml

    import samestep.engine.attempt
    import samestep.telemetry.mlflow_model  # noqa: F401
    from samestep.checkpoint.storage import Storage
    from samestep.exact import numerics
    from samestep.names import SPEC_FILE
    from samestep.scratch import sweep
    from samestep.spec import parse_spec

    sweep()  # of workers of this node that were killed
    spec = parse_spec(yaml.safe_load(part.spec))
    search = map(str, part.folders.enter())
    sys.path[:0] = [folder for folder in search if folder not in sys.path]
    try:
        importlib.import_module(spec.workload.partition(":")[0])
        Storage.at(part.run_uri).exists(SPEC_FILE)
        part.target.call("status")
        numerics.fingerprint(spec, "cpu")
    except (Exception, SystemExit) as error:  # the attempt tells it, if it comes again
        logger.info("rehearsal: %r", error)
    if not dist.is_initialized():
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        dist.destroy_process_group()
    layer = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.zeros(1, 2)).sum().backward()
    optimizer.step()
