"""Finding a run's code again: never where a bundle says, which is named in messages only."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from samestep.errors import CannotReplayError, WorkloadError
from samestep.replay.source import Rebuilding, Source
from samestep.spec import JobSpec
from samestep.workload import Workload, load_workload

DISTRIBUTIONS: Final = {
    "bs4": "beautifulsoup4",
    "cv2": "opencv_python",
    "pil": "pillow",
    "skimage": "scikit_image",
    "sklearn": "scikit_learn",
    "yaml": "pyyaml",
}
"""Of packages that are not called as their modules are, and are not here to be asked."""


def loaded(source: Source, spec: JobSpec, search: Sequence[Path]) -> Workload:
    """The run's workload, from the folders of `search` or what is installed.

    Raises:
        CannotReplayError: it is not there; says where the run found it.
    """
    try:
        workload = load_workload(spec.workload, spec.args, list(search))
    except WorkloadError as error:
        told = source.provenance
        lines = [f"the workload's code is not here, or can't be loaded: {error}"]
        cause = error.__cause__
        if isinstance(cause, ModuleNotFoundError) and cause.name:
            had = _version_of(cause.name, told.get("packages", {}))
            if had:
                lines.append(f"the run had {had}: install it")
        found_in = ", ".join(map(str, told.get("search", [])))
        revision = told.get("git_commit")
        lines.append(
            "give the folder of its module with --code"
            + (f"; the run found it in {found_in}" if found_in else "")
            + (f", at git revision {revision}" if revision else "")
        )
        raise CannotReplayError("\n".join(lines)) from error
    if isinstance(source, Rebuilding):
        source.modules = modules_of(workload, search)
    return workload


def modules_of(workload: Workload, search: Sequence[Path]) -> list[str]:
    """Names of loaded modules that are the workload's own.

    Those of its module's package, and what lies beside it in the folders that were searched.
    """
    own = type(workload).__module__
    top = own.partition(".")[0]
    folders = {str(folder) for folder in search}
    return [
        name
        for name, module in list(sys.modules.items())
        if name == own
        or name.startswith(f"{top}.")
        or os.path.dirname(getattr(module, "__file__", None) or "") in folders
    ]


def _version_of(module: str, packages: Mapping[str, str]) -> str:
    top = module.partition(".")[0].lower()
    top = DISTRIBUTIONS.get(top, top)
    for name, version in packages.items():
        if name.lower().replace("-", "_") == top:
            return f"{name}=={version}"
    return ""
