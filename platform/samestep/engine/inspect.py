"""Takes one dry step on one shard; tells what goes in, comes out, and will not be exact.

This is `samestep check`. It calls what an attempt calls, in the same order, so that whatever
would refuse or fail before the first update does so here. Nothing is written, and nothing of the
process is changed for good.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from samestep.checkpoint.state import check_encodable
from samestep.engine.appraisal import require_metrics
from samestep.engine.batch import check_batch, map_tensors, signature, to_device
from samestep.engine.buckets import trainable
from samestep.engine.canary import Formed, compare_canary, nominal_weight
from samestep.engine.feed import Fetcher
from samestep.engine.forecast import cheap_numbers, forecast
from samestep.engine.initial import load_initial
from samestep.engine.peers import Peers
from samestep.engine.report import (
    LossInfo,
    ModesInfo,
    Report,
    batch_info,
    memory_info,
    named,
    parameters_info,
    schedule_info,
    tensor_info,
)
from samestep.engine.setup import Built, before_step, build, make_replicas
from samestep.engine.step import Reduced, StepEngine
from samestep.engine.suspects import Snapshot, changes, parameters_beside, take_snapshot
from samestep.engine.update import Updated, apply_update
from samestep.errors import ExitStatus, InputError, SamestepError, UserCodeError
from samestep.exact import numerics
from samestep.exact.order import ShardPlan
from samestep.exact.seeds import global_generators_kept
from samestep.exact.sums import mean_of_sums
from samestep.spec import JobSpec
from samestep.workload import load_workload

MAX_FORECASTS: Final = 16


def inspect_job(
    spec: JobSpec, search: Sequence[Path], *, not_in_force: Sequence[str] = ()
) -> Report:
    """Takes one dry step on shard 0 of step 0 and reports.

    Args:
        spec: the job.
        search: folders in which the workload's module is looked for.
        not_in_force: settings that came too late for this process; they become warnings.
    """
    report = Report(warnings=list(not_in_force))
    with numerics.GlobalsKept(), global_generators_kept(), _path_kept():
        _Inspection(spec, report).run(search)
    return report


class _Inspection:
    def __init__(self, spec: JobSpec, report: Report) -> None:
        self._spec = spec
        self._report = report
        self._device = torch.device("cpu")
        self._batches: dict[tuple[int, ...], Any] = {}

    def run(self, search: Sequence[Path]) -> None:
        """Goes as far as training would; what stops it is the report's `refused`."""
        try:
            self._prepare()
            workload = load_workload(self._spec.workload, self._spec.args, search)
            built = build(self._spec, workload, self._device)
            initial = load_initial(self._spec, built.parts)
            if initial is not None and (initial.missing or initial.unexpected):
                self._warn(initial.note)
            self._look_at_data(built)
            self._look_at_model(built)
            self._look_beside_model(built)
            check_encodable(built.parts)
            self._read_twice(built)
            self._step(built)
        except InputError as error:
            self._stop(error, ExitStatus.BAD_INPUT)
        except SamestepError as error:
            self._stop(error, error.exit_status)
        if self._report.not_exact and not self._report.refused:
            self._report.exit_status = ExitStatus.BAD_INPUT

    def _stop(self, error: SamestepError, status: ExitStatus) -> None:
        self._report.refused.append(str(error))
        self._report.exit_status = status

    def _prepare(self) -> None:
        spec, report = self._spec, self._report
        numerics.pin(spec)
        if spec.resources.gpu and torch.cuda.is_available():
            self._device = torch.device("cuda", torch.cuda.current_device())
        elif spec.resources.gpu:
            self._warn(
                "resources.gpu is 1, but no GPU is to be seen here: checked on the CPU; devices, "
                "numerics and operations without a deterministic kernel may differ"
            )
        report.numerics = numerics.fingerprint(spec, self._device.type)
        if spec.reduction == "fast":
            self._warn("reduction: fast is stock DDP: its bits depend on the number of workers")

    def _look_at_data(self, built: Built) -> None:
        spec = self._spec
        self._report.schedule = schedule_info(spec, built)
        if spec.batch_size < spec.shards:
            self._warn(
                f"batch_size {spec.batch_size} is less than shards {spec.shards}: the last "
                f"{spec.shards - spec.batch_size} shards are always empty, and workers that own "
                "no other idle"
            )

    def _look_at_model(self, built: Built) -> None:
        spec, report, model = self._spec, self._report, built.parts.model
        report.buffers = tuple(tensor_info(name, tensor) for name, tensor in model.named_buffers())
        report.parameters = parameters_info(built)
        most = min(spec.shards, max(spec.workers.max, MAX_FORECASTS))
        report.forecasts = tuple(
            forecast(spec, trainable(model), number, device_type=self._device.type)
            for number in range(1, most + 1)
        )
        report.memory = memory_info(built, report.forecasts[0].gradient_bytes)
        report.cheap = tuple(cheap_numbers(spec.shards, most))
        wanted = report.forecasts[spec.workers.min - 1 : spec.workers.max]
        report.costly = tuple(found.num_workers for found in wanted if found.is_costly)
        if report.costly and spec.reduction == "exact":
            told = [f"{f.num_workers} ({f.traffic_factor:g}x)" for f in wanted if f.is_costly]
            self._warn(
                f"with {spec.shards} shards, these numbers of workers send more over the network "
                f"than a ring all-reduce: {named(told)}; cheap are {named(report.cheap)}"
            )
        if report.parameters.not_optimized:
            self._warn(
                "these parameters require a gradient, but are in no group of the optimizer: "
                + named(report.parameters.not_optimized)
            )

    def _look_beside_model(self, built: Built) -> None:
        """What the workload itself holds is in no checkpoint, and nobody reduces its gradients."""
        beside = parameters_beside(built.workload, built.parts.model)
        if beside:
            self._warn(
                "the workload holds parameters that require a gradient, but are not in its model: "
                f"{named(beside)}. They are not trained, and no checkpoint holds them: make "
                "them part of the module that model() returns, or freeze them"
            )

    def _warn(self, text: str) -> None:
        if text not in self._report.warnings:
            self._report.warnings.append(text)

    def _read_twice(self, built: Built) -> None:
        """The samples of shard 0, twice: private randomness in the data shows here."""
        plan = built.order.shards_of(0)[0]
        fetcher = Fetcher(built.workload, built.dataset, self._spec.seed)
        snapshots = [self._snapshot(built)]
        for _ in range(2):
            self._batches[plan.ids] = self._read(built, fetcher, plan)
            snapshots.append(take_snapshot({"batch": self._batches[plan.ids]}))
        snapshots.append(self._snapshot(built))
        batch = self._batches[plan.ids]
        self._report.batch = batch_info(to_device(batch, self._device), len(plan.ids))
        differing = changes(snapshots[1], snapshots[2])
        if differing:
            self._report.not_exact.append(
                f"the samples of step 0, shard 0, read twice, differ in {_listed(differing)}: "
                "__getitem__ or collate draws from a generator of its own, or counts; draw from "
                "the global generators (torch, numpy.random, random), which are seeded for each "
                "sample"
            )
        self._tell_attributes("reading samples", changes(snapshots[0], snapshots[3]))
        for path, kind in snapshots[0].generators.items():
            self._warn(
                f"{path} is a private generator ({kind}): nobody seeds it for each shard, and no "
                "checkpoint holds its state; draw from the global generators instead"
            )

    def _read(self, built: Built, fetcher: Fetcher, plan: ShardPlan) -> Any:
        fetched = fetcher[plan]
        if fetched.error is not None:
            raise UserCodeError(fetched.error)
        where = f"step {plan.step}, shard {plan.shard}"
        first = next(iter(self._batches.values()), fetched.batch)
        check_batch(fetched.batch, signature(first), built.workload.dimensions, where)
        return fetched.batch

    def _step(self, built: Built) -> None:
        spec, parts = self._spec, built.parts
        fetcher = Fetcher(built.workload, built.dataset, spec.seed)

        def take(plan: ShardPlan, device: torch.device) -> Any:
            if plan.ids not in self._batches:
                self._batches[plan.ids] = self._read(built, fetcher, plan)
            return to_device(map_tensors(self._batches[plan.ids], Tensor.clone), device)

        peers = Peers(None)
        replicas = make_replicas(spec, built, [self._device], peers)
        before_step(spec, built.workload, replicas, 0)
        self._look_at_model(built)  # it may have frozen or unfrozen parameters
        engine = StepEngine(
            spec=spec,
            workload=built.workload,
            replicas=replicas,
            peers=peers,
            group=None,
            scale=parts.scaled,
        )
        try:
            self._report.modes = ModesInfo(
                not_training=tuple(n for n, m in parts.model.named_modules() if not m.training),
                put_to_training=built.put_to_training,
            )
            self._tell_modes()
            formed = self._probe(built, engine, take)
            engine.nominal_weight = nominal_weight(
                spec.nominal_weight, formed.canary, engine.nominal_weight
            )
            reduced = engine.compute(0, _only_first(built.order.shards_of(0)), take, 0)
            updated = apply_update(
                spec,
                parts,
                reduced.parameters,
                step=0,
                device=self._device,
                schedule_due=built.schedule is not None and built.schedule.every == "step",
            )
            self._tell_step(built, engine, formed, reduced, updated)
        finally:
            engine.close()
        check_encodable(parts)
        if built.evaluation is not None:
            self._report.evaluation = built.evaluation.run(
                parts.model, peers, step=1, device=self._device, max_batches=1
            )
            require_metrics(spec, built.schedule, self._report.evaluation)

    def _probe(
        self, built: Built, engine: StepEngine, take: Callable[[ShardPlan, torch.device], Any]
    ) -> Formed:
        """Shard 0 of step 0 and a shard of the smallest size as an attempt does, then again."""
        first = self._snapshot(built)
        formed = compare_canary(self._spec, engine, Peers(None), built.order, take, "")
        second = self._snapshot(built)
        digest, _ = engine.probe(built.order.shards_of(0)[0], take)[0]
        every = changes(second, self._snapshot(built))
        if digest != formed.digest:
            found = f" (these attributes changed: {_listed(every)})" if every else ""
            self._report.not_exact.append(
                "step 0, shard 0, computed twice, gives other bits: the result depends on what was "
                f"computed before{found}; keep such state in registered buffers, and draw from the "
                "global generators"
            )
        self._tell_attributes("every forward", every)
        once = {path: line for path, line in changes(first, second).items() if path not in every}
        self._tell_attributes("the first forward", once)
        return formed

    def _snapshot(self, built: Built) -> Snapshot:
        return take_snapshot(
            {"model": built.parts.model, "workload": built.workload, "dataset": built.dataset}
        )

    def _tell_attributes(self, when: str, differing: dict[str, str]) -> None:
        if not differing:
            return
        self._warn(
            f"{when} changed attributes that are no buffers: {_listed(differing)}; each worker has "
            "its own, which depends on the shards it took, and no checkpoint holds them: harmless "
            "only if no loss depends on them; else register a buffer"
        )

    def _tell_modes(self) -> None:
        modes = self._report.modes
        if modes is not None and modes.put_to_training:
            self._warn(
                f"model() returned these modules in eval mode, but training puts all in train mode "
                f"before step 0: {named(modes.put_to_training)}; put them to eval mode in "
                "before_step(model, step) where that is meant"
            )

    def _tell_step(
        self, built: Built, engine: StepEngine, formed: Formed, reduced: Reduced, updated: Updated
    ) -> None:
        report, shard = self._report, formed.canary
        loss = shard.loss.detach()
        has_norm = bool(reduced.parameters)
        report.loss = LossInfo(
            tensor=tensor_info("loss", loss),
            value=shard.loss_value,
            weight=shard.weight,
            own_weight=shard.own_weight,
            nominal_weight=engine.nominal_weight,
            metrics={name: mean_of_sums([sums]) for name, sums in sorted(shard.metrics.items())},
            grad_norm=updated.grad_norm if has_norm else None,
            learning_rates=tuple(updated.learning_rates),
        )
        if not loss.isfinite():
            self._warn(f"the loss of step 0, shard 0 is {shard.loss_value}")
        elif has_norm and not abs(updated.grad_norm) < float("inf") and built.parts.scaler is None:
            self._warn(f"the gradient norm of step 0, shard 0 is {updated.grad_norm}")
        if reduced.is_empty:
            self._warn(
                "shard 0 of step 0 has weight 0: which parameters are used could not be seen"
            )
        elif report.parameters is not None:
            used = set(map(id, reduced.parameters))
            report.parameters = replace(
                report.parameters,
                unused=tuple(
                    name
                    for name, parameter in built.parts.model.named_parameters()
                    if parameter.requires_grad and id(parameter) not in used
                ),
            )
        assert report.memory is not None
        report.memory = memory_info(built, report.memory.gradient_bytes, updated=True)


def _only_first(plans: list[ShardPlan]) -> list[ShardPlan]:
    return [plans[0], *(replace(plan, positions=range(0), ids=()) for plan in plans[1:])]


def _listed(differing: dict[str, str]) -> str:
    return named([f"{path} ({line})" for path, line in differing.items()])


@contextmanager
def _path_kept() -> Iterator[None]:
    path = list(sys.path)
    try:
        yield
    finally:
        sys.path[:] = path
