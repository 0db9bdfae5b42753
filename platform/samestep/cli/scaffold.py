"""A small working workload to start from: its files, their names, its data."""

from __future__ import annotations

import csv
import importlib.util
import keyword
import math
import random
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Final

from samestep.errors import InputError
from samestep.spec import RUN_NAME

DATA_FILE: Final = "data.csv"
NUM_MADE_ROWS: Final = 600
NOISE: Final = 0.15


@dataclass(frozen=True, kw_only=True)
class Scaffold:
    """What was written.

    Attributes:
        folder: where.
        module: name of the workload's module.
        files: their names.
        data: what the data is, in a sentence.
    """

    folder: Path
    module: str
    files: tuple[str, ...]
    data: str


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of numbers, the last of each an integer label.

    Attributes:
        about: what it is, in a sentence.
    """

    about: str
    columns: Sequence[str]
    rows: Sequence[Sequence[float]]


def write_scaffold(folder: Path, *, command: str) -> Scaffold:
    """Makes a folder with a workload, its job, data, test and README.

    Args:
        folder: the new folder; its name becomes the run's.
        command: how the command line is called, for the README.

    Raises:
        InputError: the folder holds something already, can't be made, or its name can't be a
            run's.
    """
    folder = folder.absolute()
    _require_new(folder)
    module = module_name(folder.name)
    table = real_table() or made_table()
    names = {
        "workload.py.txt": f"{module}.py",
        "job.yaml.txt": "job.yaml",
        "test_workload.py.txt": f"test_{module}.py",
        "README.md.txt": "README.md",
    }
    values = {
        "NAME": folder.name,
        "MODULE": module,
        "CLASS": class_name(module),
        "DATA": table.about,
        "COMMAND": command,
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_table(folder / DATA_FILE, table)
        for template, name in names.items():
            (folder / name).write_text(_filled(template, values), encoding="utf-8")
    except OSError as error:
        raise InputError(f"can't write {folder}: {error.strerror}; choose another place") from error
    files = (*names.values(), DATA_FILE)
    return Scaffold(folder=folder, module=module, files=files, data=table.about)


def module_name(name: str) -> str:
    """A name for the workload's module that shadows no other module."""
    module = re.sub(r"\W", "_", name.lower())
    if not module[0].isalpha():
        module = f"job_{module}"
    taken = module in sys.stdlib_module_names or module in sys.modules
    return f"{module}_job" if taken or importlib.util.find_spec(module) else module


def class_name(module: str) -> str:
    """A name for the workload's class that is neither Python's nor one that its module uses."""
    name = "".join(part.capitalize() for part in module.split("_"))
    used = re.findall(r"\b[A-Z]\w*", _template("workload.py.txt"))
    return f"{name}Job" if keyword.iskeyword(name) or name in used else name


def real_table() -> Table | None:
    """Real measurements that come with scikit-learn; None where it is not installed."""
    if importlib.util.find_spec("sklearn") is None:
        return None
    from sklearn.datasets import load_breast_cancer  # type: ignore[import-untyped]

    bunch = load_breast_cancer()
    columns = [str(name).replace(" ", "_") for name in bunch.feature_names]
    values, labels = bunch.data.tolist(), bunch.target.tolist()
    rows = [[*row, label] for row, label in zip(values, labels, strict=True)]
    return Table(
        about=(
            f"A small net tells benign (1) from malignant (0) tumours by {len(columns)} measures "
            f"of their cells' nuclei: {len(rows)} real patients, from scikit-learn."
        ),
        columns=[*columns, "benign"],
        rows=rows,
    )


def made_table() -> Table:
    """Points of two half rings that reach into one another, by a formula."""
    draw = random.Random(0)
    rows: list[list[float]] = []
    for number in range(NUM_MADE_ROWS):
        label, angle = number % 2, draw.uniform(0.0, math.pi)
        x, y = math.cos(angle), math.sin(angle)
        if label:
            x, y = 1.0 - x, 0.5 - y
        noisy = [round(value + draw.uniform(-NOISE, NOISE), 4) for value in (x, y)]
        rows.append([*noisy, label])
    return Table(
        about=(
            f"A small net tells the points of two half rings apart: {len(rows)} of them, made by "
            "a formula, because scikit-learn (whose real data is used otherwise) is not installed."
        ),
        columns=["x", "y", "ring"],
        rows=rows,
    )


def write_table(path: Path, table: Table) -> None:
    """Writes a table as CSV, with a header."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(table.columns)
        writer.writerows(table.rows)


def _require_new(folder: Path) -> None:
    if not RUN_NAME.fullmatch(folder.name):
        raise InputError(
            f"{folder.name!r} becomes the name of a run, and must be letters, digits, '.', '_' and "
            "'-', start with a letter or digit, and have at most 63 characters"
        )
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file: choose another name")
    if folder.is_dir() and any(folder.iterdir()):
        raise InputError(f"{folder} is not empty: choose another name, or empty it first")


def _filled(template: str, values: dict[str, str]) -> str:
    return re.sub(r"@([A-Z]+)@", lambda match: values[match[1]], _template(template))


def _template(name: str) -> str:
    return resources.files("samestep.cli").joinpath("templates", name).read_text("utf-8")
