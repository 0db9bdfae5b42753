"""The workload's own files, for a bundle: a bounded copy of what lies beside its module."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from samestep.incidents.bundle import is_path
from samestep.incidents.redaction import Redaction
from samestep.names import BUNDLE_CODE_DIR

SUFFIXES: Final = (".py", ".yaml", ".yml")
MAX_FILES: Final = 200
MAX_FILE_BYTES: Final = 1 << 20
MAX_BYTES: Final = 8 << 20
SKIPPED: Final = frozenset({"__pycache__", "node_modules", "runs", "build", "dist"})
INSTALLED: Final = frozenset({"site-packages", "dist-packages"})


def source_files(module: Path, redaction: Redaction) -> tuple[dict[str, bytes], list[str]]:
    """The source files in a module's folder and below, by their path in a bundle.

    Links, hidden folders and those of other programs are passed over. A file with a secret in it
    is left out.

    Returns:
        The files, and sentences on what was left out.
    """
    folder = module.parent
    alone = folder.name in INSTALLED  # what else is installed there is somebody else's
    found: dict[str, bytes] = {}
    left_out: list[str] = []
    num_bytes = 0
    for path in [module] if alone else _candidates(folder):
        name = f"{BUNDLE_CODE_DIR}/{path.relative_to(folder).as_posix()}"
        if not is_path(name):
            continue
        size = path.stat().st_size
        if len(found) >= MAX_FILES or size > MAX_FILE_BYTES or num_bytes + size > MAX_BYTES:
            left_out.append(f"{name} and maybe others: more source than is kept")
            break
        data = path.read_bytes()
        if not redaction.is_free_of_secrets(data):
            left_out.append(f"{name}: it holds the value of a secret arg")
            continue
        found[name] = data
        num_bytes += len(data)
    return found, left_out


def _candidates(folder: Path) -> list[Path]:
    found = []
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(
            name for name in folders if name not in SKIPPED and not name.startswith(".")
        )
        for name in sorted(files):
            path = Path(parent, name)
            if path.suffix in SUFFIXES and not path.is_symlink() and path.is_file():
                found.append(path)
        if len(found) > MAX_FILES:
            break
    return found
