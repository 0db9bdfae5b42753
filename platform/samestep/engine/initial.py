"""Starting from the weights of another run: read once, before step 0."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from samestep.checkpoint.reading import read_at, weights_of
from samestep.checkpoint.state import Parts
from samestep.engine.ema import restart_averages
from samestep.errors import CheckpointError
from samestep.spec import JobSpec
from samestep.spec_training import source_uri


@dataclass(frozen=True, kw_only=True)
class Initial:
    """What was started from; kept in the ledger.

    Attributes:
        uri: the run or checkpoint that was named.
        step: steps before the checkpoint.
        digest: of the checkpoint.
        ema: its averages of the weights were taken.
        missing: keys of the model that it lacks: they have the workload's own initial values.
        unexpected: keys in it that the model lacks.
    """

    uri: str
    step: int
    digest: str
    ema: bool
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON data."""
        return {**vars(self), "missing": list(self.missing), "unexpected": list(self.unexpected)}

    @property
    def note(self) -> str:
        """A line for people."""
        what = "averages of the weights" if self.ema else "weights"
        text = f"starts from the {what} of {self.uri}, step {self.step}"
        if self.missing:
            text += f"; not in it, so as the workload initialised them: {', '.join(self.missing)}"
        if self.unexpected:
            text += f"; only in it, so not used: {', '.join(self.unexpected)}"
        return text


def load_initial(spec: JobSpec, parts: Parts) -> Initial | None:
    """Puts the weights that `init_from` names into the model; None: it names none.

    Raises:
        CheckpointError: there is no such checkpoint, or it does not fit; every mismatch is named.
        StorageError: it can't be read.
    """
    uri = source_uri(spec.init_from, spec.storage)
    if uri is None:
        return None
    state, manifest = read_at(uri, spec.init_from.checkpoint)
    given = weights_of(state, source=uri)
    model = parts.model
    missing, unexpected = _fit(model, given, uri, strict=spec.init_from.strict)
    model.load_state_dict({k: v for k, v in given.items() if k not in unexpected}, strict=False)
    if parts.ema is not None:
        restart_averages(parts.ema, model)
    return Initial(
        uri=uri,
        step=manifest.step,
        digest=manifest.digest,
        ema="ema" in state.values,
        missing=tuple(missing),
        unexpected=tuple(unexpected),
    )


def _fit(
    model: nn.Module, given: Mapping[str, Any], uri: str, *, strict: bool
) -> tuple[list[str], list[str]]:
    own = model.state_dict(keep_vars=True)
    missing = [key for key in own if key not in given]
    unexpected = [key for key in given if key not in own]
    problems = [
        f"{key}: {_told(given[key])} in the checkpoint, {_told(own[key])} in the model"
        for key in own
        if key in given and not _fits(given[key], own[key])
    ]
    if strict:
        problems += [f"{key}: in the model, not in the checkpoint" for key in missing]
        problems += [f"{key}: in the checkpoint, not in the model" for key in unexpected]
    if not problems and len(missing) == len(own):
        problems = [f"no key of the model ({', '.join(own)}) is in the checkpoint"]
    if problems:
        advice = ""
        if strict and (missing or unexpected):
            advice = " (init_from.strict: false takes what is there by name; shapes must agree)"
        raise CheckpointError(
            f"the weights of {uri} don't fit the model{advice}:\n  " + "\n  ".join(problems)
        )
    return missing, unexpected


def _fits(given: Any, own: Any) -> bool:
    if not (isinstance(given, Tensor) and isinstance(own, Tensor)):
        return isinstance(given, Tensor) == isinstance(own, Tensor)
    return given.shape == own.shape and given.is_complex() == own.is_complex()


def _told(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    kind = " complex" if value.is_complex() else ""
    return f"shape {tuple(value.shape)}{kind}"
