"""Variables that Ray reads when it is imported; so this module must not import it."""

from __future__ import annotations

import os
import secrets
import sys
from typing import Final

from samestep.names import Env

# What Ray Train does by default and we can't have: it changes the working directory, prints
# workers' lines twice, and takes seconds to notice that a worker is gone.
TRAIN_ENVIRONMENT: Final = {
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1",
    # Draining nodes are seen by the scaling policy, which parks the workers.
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S": "2",
}


def prepare_ray(*, starts: bool = True) -> None:
    """Sets what Ray must find when it is imported.

    A cluster that we start ourselves gets a token that lives as long as it does. Where Ray is
    already loaded, it has chosen for itself and is left alone.

    Args:
        starts: a cluster may be started; False: one that is given is used.
    """
    os.environ.update(TRAIN_ENVIRONMENT)
    if not starts or "ray" in sys.modules or os.environ.get(Env.RAY_ADDRESS):
        return
    os.environ.setdefault(Env.RAY_AUTH_MODE, "token")
    if os.environ[Env.RAY_AUTH_MODE] == "token":
        os.environ.setdefault(Env.RAY_AUTH_TOKEN, secrets.token_hex(32))
