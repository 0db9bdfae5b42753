"""Bundles that are changed in a way that fits: every size and hash is that of what is there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from samestep.checkpoint import manifest as checkpoint_manifest
from samestep.checkpoint.manifest import FileEntry
from samestep.incidents import bundle as bundle_format

STATE_MANIFEST = "state/manifest.json"


def files_in(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


def sealed(body: dict[str, Any]) -> bytes:
    """As its writer would have sealed it."""
    body.pop("sha256", None)
    return json.dumps({**body, "sha256": bundle_format._hash(body)}).encode()


def reseal(folder: Path) -> None:
    """Makes all sizes and hashes fit what is there, the state's own included."""
    state = folder / STATE_MANIFEST
    if state.exists():
        try:
            body = json.loads(state.read_bytes())
            body.pop("sha256", None)
            for name in body["files"]:
                data = (folder / "state" / name).read_bytes()
                body["files"][name] = vars(FileEntry.of(data))
            body["sha256"] = checkpoint_manifest._hash(body)
            state.write_text(json.dumps(body))
        except (ValueError, TypeError, KeyError, AttributeError, OSError):
            pass  # it is no manifest any more
    body = json.loads((folder / "bundle.json").read_bytes())
    body["files"] = {
        name: vars(FileEntry.of((folder / name).read_bytes()))
        for name in files_in(folder)
        if name != "bundle.json"
    }
    body["num_bytes"] = sum(entry["num_bytes"] for entry in body["files"].values())
    (folder / "bundle.json").write_bytes(sealed(body))
