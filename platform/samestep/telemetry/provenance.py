"""Where a run comes from: the revision of its code, and the versions it runs with."""

from __future__ import annotations

import getpass
import json
import os
import platform
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Final

from samestep.names import TAG_VERSION_PREFIX, Env, Tag

GIT_TIMEOUT_S: Final = 5.0
SUBMISSION_ID: Final = "job_submission_id"
"""Where Ray's job supervisor has it in what it tells the driver (2.60)."""
PACKAGES: Final = ("samestep", "torch", "ray", "numpy")


def facts(workload_folder: Path) -> dict[str, str]:
    """What a launcher knows and a recorder does not, by tag; what can't be found is left out."""
    found = {str(Tag.USER): _user(), **git_revision(workload_folder)}
    submitted = job_id()
    return {**found, str(Tag.JOB_ID): submitted} if submitted else found


def job_id() -> str | None:
    """The id under which Ray's jobs list what this process belongs to; None: it was not submitted.

    Ray takes `RAY_JOB_ID` out of a driver's environment, and workers find a number there that no
    list of jobs has.
    """
    if told := os.environ.get(Env.SAMESTEP_JOB_ID):
        return told
    try:
        submitted = json.loads(os.environ.get(Env.RAY_JOB_CONFIG, "{}"))["metadata"][SUBMISSION_ID]
    except (ValueError, KeyError, TypeError):
        return None
    return str(submitted)


def git_revision(folder: Path) -> dict[str, str]:
    """The commit that holds a folder, and whether files of the folder differ from it."""
    commit = _git(folder, "rev-parse", "HEAD")
    if not commit:
        return {}
    changed = _git(folder, "status", "--porcelain", "--untracked-files=no", "--", ".")
    known = {} if changed is None else {str(Tag.GIT_CHANGED): str(bool(changed)).lower()}
    return {str(Tag.GIT_COMMIT): commit, **known}


def source_of(folder: Path | None) -> dict[str, str]:
    """The commit that holds a folder (`git_commit`), and whether it was changed (`git_changed`)."""
    found = git_revision(folder) if folder is not None else {}
    named = {Tag.GIT_COMMIT: "git_commit", Tag.GIT_CHANGED: "git_changed"}
    return {name: found[tag] for tag, name in named.items() if tag in found}


@cache
def packages() -> dict[str, str]:
    """Version of every installed distribution, by name."""
    found = {
        str(name): item.version
        for item in metadata.distributions()
        if (name := item.metadata["Name"])
    }
    return dict(sorted(found.items(), key=lambda pair: pair[0].lower()))


def versions() -> dict[str, str]:
    """Versions of Python and of what bits depend on, by tag; without importing any of it."""
    found = {f"{TAG_VERSION_PREFIX}python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[f"{TAG_VERSION_PREFIX}{name}"] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


@cache
def requirements() -> str:
    """Every installed distribution as a line of a requirements file, sorted."""
    lines = {
        f"{name}=={item.version}"
        for item in metadata.distributions()
        if (name := item.metadata["Name"])
    }
    return "".join(f"{line}\n" for line in sorted(lines, key=str.lower))


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        result = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=GIT_TIMEOUT_S,
            check=False,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.TimeoutExpired):  # no git here, or a slow disk: not worth a run
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user without a name
        return str(os.getuid())
