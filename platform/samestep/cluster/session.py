"""Connecting to the Ray cluster of the environment, or starting one on this machine."""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import ray

from samestep.cluster.environment import TRAIN_ENVIRONMENT
from samestep.cluster.ray_private import own_address
from samestep.errors import InputError
from samestep.exact import numerics
from samestep.names import Env
from samestep.spec import JobSpec

logger = logging.getLogger(__name__)

ANSWER_S = 10.0
"""How long the head of a cluster may take to accept a connection."""

# Nothing large goes through Ray's object store; its default share of /dev/shm is taken from others.
OBJECT_STORE_BYTES = 256 << 20


@dataclass(frozen=True, kw_only=True)
class Session:
    """A connection to Ray.

    Attributes:
        is_local: we started the cluster, and end it.
        num_nodes: nodes that are alive and have CPUs or GPUs.
        is_copied: each worker has a copy of the working directory, made by Ray.
        address: of the cluster's head.
        notes: what the user should know.
    """

    is_local: bool
    num_nodes: int
    is_copied: bool
    address: str
    notes: list[str]


@contextmanager
def ray_session(spec: JobSpec) -> Iterator[Session]:
    """Connects for the time of a run.

    Where RAY_ADDRESS names a cluster (as in a submitted job) it is used. Else one is started on
    this machine, with the cores there are, or room for the fewest workers if that is more. A
    caller that is connected already stays so.

    Raises:
        InputError: no cluster answers at that address.
    """
    runtime_env: dict[str, Any] = {"env_vars": variables_for_workers(spec)}
    if ray.is_initialized():
        missing = [name for name in numerics.environment(spec) if not _in_runtime_env(name)]
        if missing:
            raise InputError(
                "Ray is already initialised in this process without the environment that "
                f"numerics need ({', '.join(missing)}): call samestep.train before ray.init, or "
                "pass runtime_env={'env_vars': ...} with them"
            )
        yield _described(is_local=False, notes=[])
        return
    address = os.environ.get(Env.RAY_ADDRESS)
    notes: list[str] = []
    if address:
        connect(
            address,
            advice=f"correct {Env.RAY_ADDRESS}, or unset it for a cluster on this machine alone",
            runtime_env=runtime_env,
            log_to_driver=True,
            logging_level=logging.WARNING,
        )
    else:
        notes = _start_local(spec, runtime_env)
    try:
        yield _described(is_local=not address, notes=notes)
    finally:
        ray.shutdown()


def connect(address: str, *, advice: str, **options: Any) -> None:
    """Connects to a cluster that is there; `options` are those of `ray.init`.

    Raises:
        InputError: there is none; says what to do.
    """
    host, _, port = address.rpartition(":")
    try:
        if host and port.isdecimal() and "://" not in address:
            # Ray itself tries for minutes, and tells nobody.
            socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_S).close()
        ray.init(address=address, **own_address(address), **options)
    except (OSError, ValueError, RuntimeError) as error:
        raise InputError(f"no Ray cluster answers at {address}: {error}; {advice}") from error


def _start_local(spec: JobSpec, runtime_env: dict[str, Any]) -> list[str]:
    cores = len(os.sched_getaffinity(0))
    needed = math.ceil(spec.workers.min * spec.resources.cpu)
    notes = []
    if needed > cores:
        notes.append(
            f"this machine has {cores} cores; the local cluster advertises {needed}, so that "
            f"{spec.workers.min} workers find room (they share the cores)"
        )
    with _group_of_its_own():
        ray.init(
            address="local",
            num_cpus=max(cores, needed),
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            runtime_env=runtime_env,
            log_to_driver=True,
            logging_level=logging.WARNING,
        )
    return notes


@contextmanager
def _group_of_its_own() -> Iterator[None]:
    """Starts what is started in here in another process group than this process's.

    A signal to the whole group (Ctrl-C in a terminal, `timeout`, a batch system) is meant for the
    driver, which plans a stop; the cluster must live until the last checkpoint is written.
    """
    group = os.getpgrp()
    # One process holds the new group; the other keeps the present one alive to come back to.
    new = subprocess.Popen(["cat"], stdin=subprocess.PIPE, process_group=0)
    old = subprocess.Popen(["cat"], stdin=subprocess.PIPE)
    try:
        with suppress(PermissionError):  # the leader of a session can't leave its group
            os.setpgid(0, new.pid)
        yield
    finally:
        if os.getpgrp() != group:
            os.setpgid(0, group)
        for holder in (new, old):
            holder.communicate()


def _described(*, is_local: bool, notes: list[str]) -> Session:
    alive = [node for node in ray.nodes() if node["Alive"]]
    useful = [n for n in alive if n["Resources"].get("CPU", 0) or n["Resources"].get("GPU", 0)]
    return Session(
        is_local=is_local,
        num_nodes=len(useful),
        is_copied=bool(ray.get_runtime_context().runtime_env.get("working_dir")),
        address=str(ray.get_runtime_context().gcs_address),
        notes=notes,
    )


def variables_for_workers(spec: JobSpec) -> dict[str, str]:
    """What workers need in their environment and a submitted job does not give them yet.

    Ray refuses to connect when a variable is given both by the job and here, equal or not.

    Raises:
        InputError: the job's value is another one than the numerics need.
    """
    given = _of_the_job()
    needed = numerics.environment(spec)
    wrong = [
        f"{name}={given[name]!r} against {value!r}"
        for name, value in needed.items()
        if given.get(name, value) != value
    ]
    if wrong:
        raise InputError(
            "the submitted job's runtime environment sets variables to other values than this "
            f"run's numerics need: {'; '.join(wrong)}. Take them out of env_vars of the "
            "--runtime-env, or change the job (threads, numerics.cpu_capability)"
        )
    wanted = {**needed, **TRAIN_ENVIRONMENT}
    return {name: value for name, value in wanted.items() if name not in given}


def _of_the_job() -> dict[str, str]:
    """`env_vars` of the runtime environment with which this process was submitted as a job."""
    text = os.environ.get(Env.RAY_JOB_CONFIG)
    if not text or os.environ.get(Env.RAY_OVERRIDE_JOB_RUNTIME_ENV) == "1":
        return {}
    runtime_env = json.loads(text).get("runtime_env") or {}
    return dict(runtime_env.get("env_vars") or {})


def _in_runtime_env(name: str) -> bool:
    variables = ray.get_runtime_context().runtime_env.get("env_vars") or {}
    return name in variables
