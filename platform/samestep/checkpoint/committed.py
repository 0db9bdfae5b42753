"""The checkpoints of a run as their manifests tell of them, and making one real.

Without torch, which takes long to load and much memory: the run's recorder needs no tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from samestep import names
from samestep.checkpoint.manifest import CheckpointMeta, Manifest, step_name, step_of
from samestep.checkpoint.ranking import Ranking
from samestep.checkpoint.storage import Storage
from samestep.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class CheckpointInfo:
    """A checkpoint as a listing shows it, not verified.

    Attributes:
        step: number of steps taken before it.
        uri: its folder.
        num_bytes: size of all its files.
        created_s: Unix time; None where there is no manifest that can be read.
        whole: it has a manifest: its write was finished.
        evaluation: metrics of the evaluation after its step; empty without one.
        ranking: what the run ranked its checkpoints by when it was written; None: by nothing.
    """

    step: int
    uri: str
    num_bytes: int
    created_s: float | None
    whole: bool
    evaluation: Mapping[str, float] = field(default_factory=dict)
    ranking: Ranking | None = None


def list_checkpoints(run: Storage) -> list[CheckpointInfo]:
    """All checkpoints of a run by step, unfinished ones too."""
    found = []
    for step in steps_of(run):
        folder = folder_of(run, step)
        whole = folder.exists(names.MANIFEST_FILE)
        meta = _meta(folder) if whole else None
        found.append(
            CheckpointInfo(
                step=step,
                uri=folder.uri,
                num_bytes=folder.size_bytes(),
                created_s=meta.created_s if meta else None,
                whole=whole,
                evaluation=meta.evaluation if meta else {},
                ranking=meta.ranking if meta else None,
            )
        )
    return found


def best_of(
    checkpoints: Sequence[CheckpointInfo], ranking: Ranking | None = None
) -> CheckpointInfo | None:
    """The best whole checkpoint of a listing; None when none has a score.

    Args:
        checkpoints: by step, as `list_checkpoints` gives them.
        ranking: by what; None: by what the newest one says that the run ranks by.
    """
    whole = [info for info in checkpoints if info.whole]
    ranking = ranking or (whole[-1].ranking if whole else None)
    return ranking.best_of(whole) if ranking is not None else None


def committed_digest(run: Storage, step: int) -> str | None:
    """Digest that the manifest of the checkpoint after `step` steps gives; None without one."""
    folder = folder_of(run, step)
    if not folder.exists(names.MANIFEST_FILE):
        return None
    try:
        return Manifest.from_json(folder.read(names.MANIFEST_FILE)).digest
    except CheckpointError:
        return None


def commit(run: Storage, manifest: Manifest) -> None:
    """Makes the checkpoint real: its files are there with their sizes, so the manifest goes in.

    Doing it again, with the same or another attempt's files of the same state, changes nothing
    that a reader sees.

    Raises:
        CheckpointError: a file is missing or of another size, or there is a checkpoint of this
            step of another state.
        StorageError: the manifest can't be written.
    """
    folder = folder_of(run, manifest.step)
    if folder.exists(names.MANIFEST_FILE):
        present = Manifest.from_json(folder.read(names.MANIFEST_FILE))
        if present.digest != manifest.digest:
            raise CheckpointError(
                f"{folder.uri} exists already, of a state with the digest {present.digest}; this "
                f"one has {manifest.digest}: it is never overwritten; set it aside first"
            )
    for name, entry in manifest.files.items():
        size = folder.size_bytes(name) if folder.exists(name) else None
        if size != entry.num_bytes:
            raise CheckpointError(
                f"can't commit {folder.uri}: {name} should have {entry.num_bytes} bytes, "
                f"{'is missing' if size is None else f'has {size}'}; save again"
            )
    folder.write(names.MANIFEST_FILE, manifest.to_json().encode("ascii"))


def steps_of(run: Storage) -> list[int]:
    """Steps that have a folder, whole or not, in order."""
    found = (step_of(name) for name in run.list(names.CHECKPOINTS_DIR))
    return sorted(step for step in found if step is not None)


def folder_of(run: Storage, step: int) -> Storage:
    """The folder of the checkpoint after `step` steps."""
    return run.child(names.CHECKPOINTS_DIR).child(step_name(step))


def _meta(folder: Storage) -> CheckpointMeta | None:
    try:
        return Manifest.from_json(folder.read(names.MANIFEST_FILE)).meta
    except CheckpointError:
        return None
