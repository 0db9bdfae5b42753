"""Step times against stock DistributedDataParallel, and what the exact reduction takes.

    make bench                                     the first four, under 30 minutes on two cores
    make bench ARGS=--quick                        everything, a few minutes, to see that it works
    make bench ARGS="--parts steps --models mlp"   a part of it

How: all engines live in the same worker processes (torchrun starts them) and take steps in turn,
in an order that changes from round to round, from the same batches in memory. Compared are the
times of one round; of these ratios the median per launch, and of those the median, least and
largest over launches. Step times by themselves drift too much to be compared. The plain script gets
what samestep's workers have: MKL_CBWR, and an allocator that keeps freed memory for the next step;
without the latter page faults make one engine or another slower, by chance, in each launch.

    steps         exact, fast and a plain DDP script under two sets of stock flags: the default,
                  and gradient_as_bucket_view=True with set_to_none=False ("bucket view"); with
                  several shards per worker the plain script accumulates under no_sync, and the two
                  sets of flags take turns, so that half of the rounds go to each
    profile       where the exact engine's time goes
    counts        extra gradient buffers and bytes sent in a step, against the forecast
    dataparallel  one process with all shards in turn against workers in parallel; on GPUs also
                  stock nn.DataParallel
    telemetry     (only when asked for by --parts) chargpt through Ray with MLflow and Prometheus
                  off, on, with a server that never answers, and with one that is away
    outage        (only when asked for by --parts) what an hour without MLflow adds to the ledger,
                  and how long it takes to deliver it into a SQLite file
    load          (only when asked for by --parts) what the recorder takes while 2,000 workers tell
                  it something every second
    checkpoints   (only when asked for by --parts) how long a save of 200 MB holds training up with
                  1 and 2 workers, over torch.save of the same state to the same disk (TMPDIR
                  chooses it), with PyTorch's async_save beside it; step times while a checkpoint
                  is written; and what snapshots cost, and take of shared memory
    recovery      (only when asked for by --parts) seconds without a new step after a killed worker:
                  samestep, torchrun's elastic restart and plain Ray Train; and of samestep when all
                  workers die, and when a node dies, joins, is drained or (as root) is cut off
    incidents     (only when asked for by --parts) what judging and recording each step costs,
                  and an audit every 10 steps with one shard per worker; how soon the bundle of
                  an incident is whole, and what another worker notices of that; and how long
                  `samestep replay` takes with a bundle of digits, as a process of its own
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from incidents import AUDITED, BARE, BLOCK_STEPS, WATCHED
from launches import LaunchError, launch
from models import MODELS
from ratios import bundle_row, save_rows, snapshot_row, step_rows, watching_row
from report import (
    print_bundles,
    print_checkpoints,
    print_counts,
    print_dataparallel,
    print_load,
    print_outage,
    print_profile,
    print_recovery,
    print_replays,
    print_snapshots,
    print_steps,
    print_telemetry,
    print_watching,
)
from rich.console import Console
from whole_runs import replay_times, telemetry_courses, telemetry_rows

from samestep.cluster.environment import prepare_ray

BASES = ("plain, default flags", "plain, bucket view")
DEFAULT_PARTS = ("steps", "profile", "counts", "dataparallel")
PARTS = (*DEFAULT_PARTS, "telemetry", "outage", "load", "checkpoints", "recovery", "incidents")

# By number of workers, numbers of shards: powers of two and others, aligned and not.
COUNTED = {1: [1, 2, 4, 6], 2: [2, 4, 6, 8, 12], 3: [3, 8, 12, 16], 4: [4, 8, 12, 105]}
DATAPARALLEL_MODELS = ("digits", "mlp")
DATAPARALLEL_SHARDS = 4
DATAPARALLEL_ROUNDS = 30
PROFILE_ROUNDS = 20
NOT_JUDGED = 3
TELEMETRY_ROUNDS = 5
TELEMETRY_STEPS = 150
CHECKPOINT_WORKERS = (1, 2)
CHECKPOINT_ROUNDS = 5
RECOVERY_MODELS = ("chargpt",)
RECOVERY_KILLS = 10
WATCHED_MODELS = ("mlp", "chargpt")
WATCHED_ROUNDS_SHARE = 5
BUNDLE_MODELS = ("mlp", "digits")
BUNDLE_ROUNDS = 3
REPLAY_MODEL = "digits"
REPLAYS = 5
# The step of a block that is audited takes a shard once more: as long as another step, at most.
WATCHED_LIMITS = {WATCHED: 1.01, AUDITED: 1 + 1 / BLOCK_STEPS}

QUICK = {"launches": 1, "rounds": 10}


class Bench:
    """The parts, and what they found so far."""

    def __init__(self, options: argparse.Namespace, console: Console) -> None:
        self._options = options
        self._console = console
        self.found: dict[str, Any] = {
            "machine": _machine(),
            "options": {key: value for key, value in vars(options).items() if key != "output"},
        }

    def run(self) -> None:
        """Runs the chosen parts one after another."""
        parts: dict[str, Callable[[], None]] = {
            "steps": self._steps,
            "profile": self._profile,
            "counts": self._counts,
            "dataparallel": self._dataparallel,
            "telemetry": self._telemetry,
            "recovery": self._recovery,
            "outage": self._outage,
            "load": self._load,
            "checkpoints": self._checkpoints,
            "incidents": self._incidents,
        }
        for name in self._options.parts:
            parts[name]()

    def _launch(self, task: dict[str, Any], *, workers: int | None = None) -> Any:
        common = ("threads", "rounds", "stock_heap")
        task = {**{name: getattr(self._options, name) for name in common}, **task}
        return launch(task, workers=workers or self._options.workers)

    def _launches(self, task: dict[str, Any]) -> list[Any]:
        is_judged = MODELS[task["model"]].is_judged
        number = self._options.launches if is_judged else min(self._options.launches, NOT_JUDGED)
        return [self._launch(task) for _ in range(number)]

    def _steps(self) -> None:
        self.found["steps"] = []
        for name in self._options.models:
            for shards in self._options.shards_per_worker:
                task = {"kind": "steps", "model": name, "shards_per_worker": shards}
                if shards > 1:  # longer steps: fewer of them tell as much
                    task["rounds"] = max(1, self._options.rounds * 7 // 10)
                launches = self._launches(task)
                engines = step_rows(launches, BASES)
                exact = next(row for row in engines if row["engine"] == "exact")
                found = {
                    **task,
                    "workers": self._options.workers,
                    "shard_size": MODELS[name].size_of_shards(shards),
                    "is_judged": MODELS[name].is_judged,
                    "engines": engines,
                    "worst_ratio": max(ratio["median"] for ratio in exact["ratios"].values()),
                    "launches_s": launches,
                }
                self.found["steps"].append(found)
                print_steps(self._console, found, BASES)

    def _profile(self) -> None:
        self.found["profile"] = []
        for name in self._options.models:
            for shards in self._options.shards_per_worker:
                task = {
                    "kind": "profile",
                    "model": name,
                    "shards_per_worker": shards,
                    "rounds": min(self._options.rounds, PROFILE_ROUNDS),
                }
                found = {**task, "parts_ms": self._launch(task)}
                self.found["profile"].append(found)
                print_profile(self._console, found)

    def _counts(self) -> None:
        self.found["counts"] = []
        for workers, shards in COUNTED.items():
            task = {"kind": "counts", "model": "digits", "shards": shards}
            self.found["counts"] += self._launch(task, workers=workers)
        print_counts(self._console, self.found["counts"])

    def _dataparallel(self) -> None:
        self.found["dataparallel"] = []
        for name in DATAPARALLEL_MODELS:
            if name not in self._options.models:
                continue
            task = {
                "kind": "dataparallel",
                "model": name,
                "shards": DATAPARALLEL_SHARDS,
                "rounds": min(self._options.rounds, DATAPARALLEL_ROUNDS),
            }
            launches = self._launches(task)
            found = {
                **task,
                "workers": self._options.workers,
                "gpus": torch.cuda.device_count(),
                "engines": step_rows(launches, ["ddp"]),
                "launches_s": launches,
            }
            self.found["dataparallel"].append(found)
            print_dataparallel(self._console, found)

    def _telemetry(self) -> None:
        quick = self._options.quick
        courses = telemetry_courses(
            workers=self._options.workers,
            rounds=1 if quick else min(self._options.rounds, TELEMETRY_ROUNDS),
            num_steps=60 if quick else TELEMETRY_STEPS,
        )
        self.found["telemetry"] = telemetry_rows(courses)
        print_telemetry(self._console, self.found["telemetry"], workers=self._options.workers)

    def _recovery(self) -> None:
        prepare_ray()  # Ray reads its settings when it is imported
        from recovery import recovery_row

        self.found["recovery"] = []
        kills = 2 if self._options.quick else RECOVERY_KILLS
        for name in self._options.models:
            if name not in RECOVERY_MODELS:
                continue
            found = {"model": name, "kills": kills}
            found |= recovery_row(name, kills, peer_kills=max(2, kills // 2), say=self._say)
            self.found["recovery"].append(found)
            print_recovery(self._console, found)

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False)

    def _outage(self) -> None:
        prepare_ray()
        from recorders import outage_figures

        self.found["outage"] = outage_figures(num_steps=3_600 if self._options.quick else 36_000)
        print_outage(self._console, self.found["outage"])

    def _load(self) -> None:
        prepare_ray()
        from recorders import load_figures

        quick = self._options.quick
        self.found["load"] = load_figures(
            num_workers=200 if quick else 2_000, seconds=5 if quick else 20
        )
        print_load(self._console, self.found["load"])

    def _checkpoints(self) -> None:
        self.found["checkpoints"] = []
        for workers in CHECKPOINT_WORKERS:
            task = {
                "kind": "checkpoints",
                "model": "mlp",
                "rounds": min(self._options.rounds, CHECKPOINT_ROUNDS),
                "folder": None,
            }
            launches = [self._launch(task, workers=workers) for _ in range(self._options.launches)]
            found = {**task, "workers": workers, **save_rows(launches), **snapshot_row(launches)}
            self.found["checkpoints"].append({**found, "launches_s": launches})
            print_checkpoints(self._console, found)
            print_snapshots(self._console, found)

    def _incidents(self) -> None:
        found: dict[str, Any] = {"watching": []}
        self.found["incidents"] = found
        for name in WATCHED_MODELS:
            if name not in self._options.models:
                continue
            rounds = max(1, self._options.rounds // WATCHED_ROUNDS_SHARE)
            task = {"kind": "watching", "model": name, "rounds": rounds}
            launches = self._launches(task)
            row = {**task, "workers": self._options.workers, "launches_s": launches}
            row["engines"] = step_rows(launches, [BARE])
            row |= watching_row(launches, BARE)
            found["watching"].append(row)
            print_watching(self._console, row, BARE, WATCHED_LIMITS)
        found["bundles"] = []
        for name in BUNDLE_MODELS:
            if name not in self._options.models:
                continue
            rounds = min(self._options.rounds, BUNDLE_ROUNDS)
            task = {"kind": "bundles", "model": name, "rounds": rounds}
            launches = self._launches(task)
            row = {**task, "workers": self._options.workers, **bundle_row(launches)}
            found["bundles"].append({**row, "launches_s": launches})
            print_bundles(self._console, row)
        if REPLAY_MODEL in self._options.models:
            found["replay_s"] = replay_times(min(self._options.rounds, REPLAYS))
            print_replays(self._console, found["replay_s"])


def main() -> int:
    options = _options()
    console = Console(width=None if sys.stdout.isatty() else 140)
    bench = Bench(options, console)
    started = time.monotonic()
    try:
        bench.run()
    except LaunchError as error:
        console.print(str(error), markup=False)
        return 1
    finally:
        bench.found["machine"]["load_average_at_end"] = os.getloadavg()
        bench.found["took_s"] = time.monotonic() - started
        options.output.write_text(json.dumps(bench.found, indent=1))
        console.print(f"took {bench.found['took_s'] / 60:.1f} minutes; saved to {options.output}")
    wrong = [row for row in bench.found.get("counts", []) if not row["as_forecast"]]
    return 1 if wrong else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="1 launch of 10 rounds")
    parser.add_argument("--parts", type=_chosen(PARTS), default=list(DEFAULT_PARTS))
    parser.add_argument("--models", type=_chosen(tuple(MODELS)), default=list(MODELS))
    parser.add_argument("--shards-per-worker", type=_numbers, default=[1, 4], metavar="N,N")
    parser.add_argument("--launches", type=_positive, help="of each group of workers (5)")
    parser.add_argument("--rounds", type=_positive, help="of each launch (100)")
    parser.add_argument("--workers", type=_positive, default=2)
    parser.add_argument("--threads", type=_positive, default=1, help="per worker")
    parser.add_argument(
        "--stock-heap",
        action="store_true",
        help="leave the allocator as it is by default (samestep's workers keep freed memory)",
    )
    parser.add_argument("--output", type=Path, default=Path("bench.json"))
    options = parser.parse_args()
    options.launches = options.launches or (QUICK["launches"] if options.quick else 5)
    options.rounds = options.rounds or (QUICK["rounds"] if options.quick else 100)
    return options


def _chosen(allowed: tuple[str, ...]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = text.split(",")
        for name in names:
            if name not in allowed:
                raise argparse.ArgumentTypeError(
                    f"{name!r} is none of {', '.join(allowed)} (several: a,b)"
                )
        return names

    return parse


def _numbers(text: str) -> list[int]:
    return [_positive(part) for part in text.split(",")]


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of 1 or more")
    return int(text)


def _machine() -> dict[str, Any]:
    return {
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "gpus": torch.cuda.device_count(),
        "load_average_at_start": os.getloadavg(),
    }


if __name__ == "__main__":
    sys.exit(main())
