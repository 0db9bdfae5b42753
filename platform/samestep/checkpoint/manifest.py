"""The manifest of a checkpoint: what it consists of, and the proof that it is whole.

Written last: a folder without one is no checkpoint. It holds a hash of itself, so that damage to
it is told apart from damage to the files.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from samestep import names
from samestep.checkpoint.layout import Layout
from samestep.checkpoint.ranking import Ranking
from samestep.checkpoint.strict_json import parse_json
from samestep.errors import CheckpointError
from samestep.exact.digest import pack_float, unpack_float

FORMAT: Final = 2
"""Version of the manifest, of the values file and of how tensors are named and stored.

Since 2 a tensor may be cut into pieces, each in a file of its own.
"""
READABLE_FORMATS: Final = (1, 2)

_STEP_NAME: Final = re.compile(re.escape(names.CHECKPOINT_PREFIX) + r"(\d{8,})")


@dataclass(frozen=True, kw_only=True)
class CheckpointMeta:
    """What is kept with a state so that others can judge it; both mappings are plain JSON.

    Attributes:
        numerics: the fingerprint under which the state was computed.
        spec: the part of the job's spec that affects bits.
        created_s: Unix time.
        evaluation: metrics of the evaluation after the checkpoint's step; empty without one.
        ranking: what the run ranked its checkpoints by when it was written; None: by nothing.
    """

    numerics: Mapping[str, Any]
    spec: Mapping[str, Any]
    created_s: float
    evaluation: Mapping[str, float] = field(default_factory=dict)
    ranking: Ranking | None = None


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """Size and SHA-256 (hex) of one file of a checkpoint."""

    num_bytes: int
    sha256: str

    @classmethod
    def of(cls, data: bytes) -> FileEntry:
        """The entry of a file with this content."""
        return cls(num_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


@dataclass(frozen=True, kw_only=True)
class PieceEntry:
    """Elements `start` to `stop` of a tensor, in C order; in `file`, as a 1-dim tensor."""

    file: str
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """In which file a tensor lies, and how it lay in memory.

    Attributes:
        layout: dtype, shape and strides of the live tensor.
        file: that has all of it; empty where it is cut.
        pieces: of one that is cut, in order.
    """

    layout: Layout
    file: str = ""
    pieces: tuple[PieceEntry, ...] = ()

    @property
    def files(self) -> list[str]:
        """The files it lies in."""
        return [self.file] if self.file else [piece.file for piece in self.pieces]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON; only what there is."""
        pieces = [asdict(piece) for piece in self.pieces]
        where: dict[str, Any] = {"file": self.file} if self.file else {"pieces": pieces}
        return {**where, **asdict(self.layout)}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TensorEntry:
        """Inverse of `to_json`."""
        return cls(
            layout=Layout(
                dtype=data["dtype"], shape=tuple(data["shape"]), strides=tuple(data["strides"])
            ),
            file=data.get("file", ""),
            pieces=tuple(PieceEntry(**piece) for piece in data.get("pieces", ())),
        )


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Attributes as they stand in the file; `digest` is what `state_sha256` gives."""

    step: int
    files: Mapping[str, FileEntry]
    tensors: Mapping[str, TensorEntry]
    digest: str
    meta: CheckpointMeta
    samestep_version: str

    @property
    def name(self) -> str:
        """Name of the checkpoint's folder."""
        return step_name(self.step)

    @property
    def num_bytes(self) -> int:
        """Size of all files together, without the manifest."""
        return sum(entry.num_bytes for entry in self.files.values())

    def to_json(self) -> str:
        """Strict JSON text, with a hash of itself.

        Raises:
            CheckpointError: the meta data is no plain JSON.
        """
        body = {
            "format": FORMAT,
            "step": self.step,
            "digest": self.digest,
            "samestep_version": self.samestep_version,
            "created_s": self.meta.created_s,
            "evaluation": {name: pack_float(value) for name, value in self.meta.evaluation.items()},
            "ranking": asdict(self.meta.ranking) if self.meta.ranking else None,
            "numerics": dict(self.meta.numerics),
            "spec": dict(self.meta.spec),
            "files": {name: asdict(entry) for name, entry in self.files.items()},
            "tensors": {name: entry.to_json() for name, entry in self.tensors.items()},
        }
        try:
            return json.dumps({**body, "sha256": _hash(body)}, indent=1, allow_nan=False) + "\n"
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"numerics or spec of the checkpoint of step {self.step} is no plain JSON: {error}"
            ) from error

    @classmethod
    def from_json(cls, text: str | bytes) -> Manifest:
        """Reads what `to_json` wrote.

        Raises:
            CheckpointError: empty, cut, altered, or of another format version.
        """
        try:
            data = parse_json(text.decode("utf-8") if isinstance(text, bytes) else text)
        except UnicodeDecodeError as error:
            raise CheckpointError(f"not UTF-8: {error}") from error
        if not isinstance(data, dict):
            raise CheckpointError(f"a manifest is an object, got {type(data).__name__}")
        if data.get("format") not in READABLE_FORMATS:
            known = ", ".join(map(str, READABLE_FORMATS))
            raise CheckpointError(
                f"format {data.get('format')!r}; this version of samestep reads the formats "
                f"{known}: use the version of samestep that wrote it"
            )
        if data.pop("sha256", None) != _hash(data):
            raise CheckpointError("its own hash does not fit its content")
        try:
            return cls._from_body(data)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(f"malformed ({type(error).__name__}: {error})") from error

    @classmethod
    def _from_body(cls, data: dict[str, Any]) -> Manifest:
        return cls(
            step=data["step"],
            files={name: FileEntry(**entry) for name, entry in data["files"].items()},
            tensors={name: TensorEntry.from_json(item) for name, item in data["tensors"].items()},
            digest=data["digest"],
            meta=CheckpointMeta(
                numerics=data["numerics"],
                spec=data["spec"],
                created_s=data["created_s"],
                evaluation={
                    name: unpack_float(value) for name, value in data.get("evaluation", {}).items()
                },
                ranking=Ranking(**data["ranking"]) if data.get("ranking") else None,
            ),
            samestep_version=data["samestep_version"],
        )


def step_name(step: int) -> str:
    """Name of the folder of the checkpoint taken after `step` steps."""
    assert step >= 0, f"a checkpoint needs a step, got {step}"
    return f"{names.CHECKPOINT_PREFIX}{step:08d}"


def step_of(name: str) -> int | None:
    """The step whose checkpoint's folder has this name; None: it is none."""
    match = _STEP_NAME.fullmatch(name)
    if match is None or step_name(int(match[1])) != name:
        return None
    return int(match[1])


def _hash(body: Mapping[str, Any]) -> str:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode("ascii")).hexdigest()
