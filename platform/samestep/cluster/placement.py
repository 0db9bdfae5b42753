"""Which mode `auto` means here, and whether there is room; decided before anything starts."""

from __future__ import annotations

import math

import ray
from ray.util.placement_group import placement_group, remove_placement_group

from samestep.cluster.session import Session
from samestep.errors import PlacementError
from samestep.spec import JobSpec, Mode


def worker_resources(spec: JobSpec) -> dict[str, float]:
    """What one worker takes, in Ray's names."""
    resources = {"CPU": float(spec.resources.cpu)}
    if spec.resources.gpu:
        resources["GPU"] = float(spec.resources.gpu)
    return resources


def num_slots(spec: JobSpec) -> int:
    """How many workers the cluster could hold if it were empty."""
    needed = worker_resources(spec)
    return sum(
        min(math.floor(node["Resources"].get(name, 0) / amount) for name, amount in needed.items())
        for node in ray.nodes()
        if node["Alive"]
    )


def settle_mode(spec: JobSpec, session: Session, *, no_fallback: bool) -> tuple[Mode, str]:
    """The mode to run in and why, where it is not what was asked for.

    `auto` falls back to `dataparallel` only on a cluster of one node: a job for many machines
    must not end up on one unnoticed.

    Raises:
        PlacementError: no room for the fewest workers, and no falling back.
    """
    if spec.mode is Mode.DATAPARALLEL:
        _require_room_for_actor(spec)
        return Mode.DATAPARALLEL, ""
    slots = num_slots(spec)
    may_fall_back = (
        spec.mode is Mode.AUTO
        and not no_fallback
        and session.num_nodes <= 1
        and spec.reduction == "exact"
    )
    if may_fall_back and slots <= 1:
        _require_room_for_actor(spec)
        return (
            Mode.DATAPARALLEL,
            f"a single node with {slots} slot(s): falling back to dataparallel",
        )
    # Where nothing else may be done it is asked for in any case: an autoscaler may make the room.
    is_possible = slots >= spec.workers.min or not may_fall_back
    if is_possible and _has_room(spec, [worker_resources(spec)] * spec.workers.min):
        return Mode.DDP, ""
    what = (
        f"no room for {spec.workers.min} workers of {worker_resources(spec)} within "
        f"{spec.faults.placement_timeout_s:g} s (the cluster has {slots} slots on "
        f"{session.num_nodes} node(s), not all of them free)"
    )
    if may_fall_back:
        _require_room_for_actor(spec)
        return Mode.DATAPARALLEL, f"{what}: falling back to dataparallel"
    raise PlacementError(
        f"{what}: lower workers.min or resources, free the cluster, add nodes, or raise "
        "faults.placement_timeout_s"
    )


def actor_resources(spec: JobSpec) -> dict[str, float]:
    """What the actor of mode dataparallel takes: all GPUs of a node, and no more CPUs than it has.

    Raises:
        PlacementError: GPUs are asked for and no node has one.
    """
    alive = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    most = max((resources.get("CPU", 0.0) for resources in alive), default=0.0)
    resources = {"CPU": min(float(spec.resources.cpu), most)}
    if spec.resources.gpu:
        gpus = max((math.floor(node.get("GPU", 0)) for node in alive), default=0)
        if gpus == 0:
            raise PlacementError(
                "resources.gpu is 1, but no node of the cluster has a GPU: set resources.gpu: 0 to "
                "train on the CPU (other bits than on a GPU)"
            )
        resources["GPU"] = float(gpus)
    return resources


def _require_room_for_actor(spec: JobSpec) -> None:
    resources = actor_resources(spec)
    if not _has_room(spec, [resources]):
        raise PlacementError(
            f"no room for the actor of mode dataparallel ({resources}) within "
            f"{spec.faults.placement_timeout_s:g} s: free the cluster, lower resources, or raise "
            "faults.placement_timeout_s"
        )


def _has_room(spec: JobSpec, bundles: list[dict[str, float]]) -> bool:
    group = placement_group(bundles, strategy="PACK")
    try:
        return bool(group.wait(spec.faults.placement_timeout_s))
    finally:
        remove_placement_group(group)
