"""Which faults strike a drill, and when: from a file, or from a seed."""

from __future__ import annotations

import difflib
import random
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic import Field, ValidationError

from samestep import yaml12
from samestep.errors import SpecError
from samestep.spec_part import Part

RANDOM_PREFIX: Final = "random:"
MAX_RANDOM_STRIKES: Final = 3


class Fault(StrEnum):
    """What can strike: a closed list."""

    KILL_WORKER = "kill_worker"
    KILL_ALL_WORKERS = "kill_all_workers"
    TERMINATE_WORKER = "terminate_worker"
    TERMINATE_ALL_WORKERS = "terminate_all_workers"
    FREEZE_WORKER = "freeze_worker"
    KILL_RECORDER = "kill_recorder"
    KILL_NODE = "kill_node"
    DRAIN_NODE = "drain_node"
    CUT_NODE = "cut_node"
    ADD_NODE = "add_node"
    KILL_DRIVER = "kill_driver"
    STOP_DRIVER = "stop_driver"


MEANING: Final = {
    Fault.KILL_WORKER: "SIGKILL to one worker",
    Fault.KILL_ALL_WORKERS: "SIGKILL to all workers at once",
    Fault.TERMINATE_WORKER: "SIGTERM to one worker",
    Fault.TERMINATE_ALL_WORKERS: "SIGTERM to all workers; the run is then started again",
    Fault.FREEZE_WORKER: "SIGSTOP to one worker, for good",
    Fault.KILL_RECORDER: "SIGKILL to the run's recorder",
    Fault.KILL_NODE: "SIGKILL to a node and all that runs on it",
    Fault.DRAIN_NODE: "SIGTERM to a node",
    Fault.CUT_NODE: "the link to a node is cut, for good; needs root",
    Fault.ADD_NODE: "a new node joins",
    Fault.KILL_DRIVER: "SIGKILL to the driver, which is then started again",
    Fault.STOP_DRIVER: "SIGTERM to the driver, which is then started again",
}
TAKES_NODE: Final = (Fault.KILL_NODE, Fault.DRAIN_NODE, Fault.CUT_NODE)
OF_NODES: Final = (*TAKES_NODE, Fault.ADD_NODE)
"""What strikes nodes: they must be the drill's own."""


class Strike(Part):
    """One fault of a drill."""

    fault: Fault = Field(strict=False, description="what strikes")
    step: int = Field(ge=0, description="strikes as soon as so many steps are taken")
    worker: int = Field(0, ge=0, description="world rank (modulo the group's size), or the node's")


def read_strikes(path: Path | str) -> list[Strike]:
    """The strikes of a file: a YAML list of mappings with `fault`, `step` and `worker`.

    Raises:
        SpecError: it can't be read, or names a fault that there is not.
    """
    try:
        data = yaml12.load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SpecError(f"can't read the faults file {path}: {error}") from error
    if not isinstance(data, list) or not data:
        raise SpecError(
            f"{path} must be a list of faults, such as - {{fault: kill_worker, step: 20}}; got "
            f"{data!r}"[:300]
        )
    return sorted((_strike(item, f"{path}, item {n}") for n, item in enumerate(data)), key=_at)


def random_strikes(
    seed: int, number: int, *, num_steps: int, num_nodes: int | None
) -> list[Strike]:
    """One to three strikes for one round: a function of seed, round, steps and nodes alone.

    There is always a node left: one that is killed or drained is followed by one that joins.

    Args:
        seed: of the drill.
        number: of the round, from 0.
        num_steps: that the run takes; all strikes fall between 10 % and 80 % of them.
        num_nodes: that the cluster has at the start of a round; None: it is not the drill's own,
            and no node is struck.
    """
    draw = random.Random(f"{seed}/{number}")
    first, last = max(1, num_steps // 10), max(2, num_steps * 8 // 10)
    places = draw.sample(range(first, last + 1), k=min(MAX_RANDOM_STRIKES, last + 1 - first))
    steps = sorted(places[: draw.randint(1, len(places))])
    unwanted = OF_NODES if num_nodes is None else (Fault.CUT_NODE,)  # not everybody is root
    among = [fault for fault in Fault if fault not in unwanted]
    strikes: list[Strike] = []
    nodes_left = num_nodes or 0
    for step in steps:
        allowed = [f for f in among if nodes_left > 1 or f not in TAKES_NODE]
        must_join = num_nodes is not None and nodes_left < num_nodes
        fault = Fault.ADD_NODE if must_join else draw.choice(allowed)
        nodes_left += (fault is Fault.ADD_NODE) - (fault in TAKES_NODE)
        strikes.append(Strike(fault=fault, step=step, worker=draw.randrange(16)))
    return strikes


def parse_faults(text: str) -> int | list[Strike]:
    """The argument of `--faults`: a seed, or the strikes of a file.

    Raises:
        SpecError: neither.
    """
    if text.startswith(RANDOM_PREFIX):
        seed = text.removeprefix(RANDOM_PREFIX)
        if not seed.isdecimal():
            raise SpecError(f"--faults {text}: random: takes a number of 0 or more, got {seed!r}")
        return int(seed)
    return read_strikes(text)


def refuse_of_nodes(strikes: Sequence[Strike]) -> None:
    """For a drill on a cluster that is given: its nodes are left alone.

    Raises:
        SpecError: a fault strikes nodes.
    """
    wrong = sorted({str(strike.fault) for strike in strikes if strike.fault in OF_NODES})
    if wrong:
        possible = ", ".join(fault for fault in Fault if fault not in OF_NODES)
        raise SpecError(
            f"{', '.join(wrong)} can't strike a cluster that is given, whose nodes are not the "
            f"drill's own; possible there: {possible}. Without --address the drill starts nodes "
            "that it may strike"
        )


def _strike(item: Any, where: str) -> Strike:
    known = [fault.value for fault in Fault]
    if not isinstance(item, dict):
        raise SpecError(
            f"{where}: give a mapping such as {{fault: kill_worker, step: 20}}: {item!r}"
        )
    if item.get("fault") not in known:
        name = str(item.get("fault"))
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
        hint = f": did you mean {near[0]}?" if near else "."
        raise SpecError(f"{where}: there is no fault {name!r}{hint} Allowed: {', '.join(known)}")
    try:
        return Strike.model_validate(item)
    except ValidationError as error:
        told = "; ".join(
            f"{'.'.join(map(str, e['loc']))}: {e['msg']}, got {e['input']!r}"
            for e in error.errors(include_url=False)
        )
        raise SpecError(f"{where}: {told}") from None


def _at(strike: Strike) -> int:
    return strike.step
