"""How to call a program of this environment from where the user is."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path


def program(name: str) -> str:
    """The shortest that works: its bare name where PATH leads to this environment's, else a path.

    Where this environment has no such program, its name.
    """
    own = Path(sys.executable).with_name(name)
    if not own.exists():
        return name
    found = shutil.which(name)
    if found is not None and os.path.samefile(found, own):
        return name
    return str(own.relative_to(Path.cwd())) if own.is_relative_to(Path.cwd()) else str(own)
