"""Calling a workload's hooks: on every worker alike, with reduced values, and their errors told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from samestep.engine.shard import in_user_code
from samestep.exact.seeds import Purpose, seed_everything
from samestep.workload import Values, Workload


class Hooks:
    """The hooks that a workload defines; the others cost nothing.

    Args:
        workload: the user's.
        seed: the job's; what a hook draws is the same on every worker.
        device: of the model.
    """

    def __init__(self, workload: Workload, *, seed: int, device: torch.device) -> None:
        self._workload = workload
        self._seed = seed
        self._device = device
        self._has_on_step = type(workload).on_step is not Workload.on_step
        self._has_on_epoch = type(workload).on_epoch is not Workload.on_epoch

    def on_step(self, values: Values) -> None:
        """After the update of a step.

        Raises:
            UserCodeError: the hook raised.
        """
        if self._has_on_step:
            seed_everything(self._seed, Purpose.HOOK, 0, values.step, device=self._device)
            what = f"{self._name}.on_step after step {values.step}"
            in_user_code(lambda: self._workload.on_step(values.step, values), what)

    def on_epoch(self, values: Values, evaluation: Mapping[str, float] | None) -> None:
        """After the last step of an epoch and its evaluation, before its checkpoint.

        Raises:
            UserCodeError: the hook raised.
        """
        if self._has_on_epoch:
            seed_everything(self._seed, Purpose.HOOK, 1, values.epoch, device=self._device)
            what = f"{self._name}.on_epoch after epoch {values.epoch}, step {values.step}"
            told = replace(values, evaluation=dict(evaluation) if evaluation else None)
            in_user_code(lambda: self._workload.on_epoch(values.epoch, told), what)

    @property
    def _name(self) -> str:
        return type(self._workload).__name__
