"""Publish the weights of a training engine by the method of the run."""

import logging
import time
from types import TracebackType
from typing import Any, Protocol, Self

import torch

from trainsync.api.protocol import ParticipantRef, SaveKind, SaveRequest, SaveState
from trainsync.api.spec import SyncMethod
from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.engines.adapt import adapt
from trainsync.engines.fsdp.state_dicts import fsdp_save_state_dict, fsdp_upload_state_dict
from trainsync.engines.megatron.state_dicts import (
    megatron_save_state_dict,
    megatron_upload_state_dict,
    refuse_delta,
)
from trainsync.engines.protocol import is_megatron
from trainsync.engines.publish.model_update_group import ModelUpdateGroup, fsdp_sync_weight_nccl
from trainsync.engines.publish.proving import check_prover, proof_of
from trainsync.engines.publish.report import PublishReport
from trainsync.engines.publish.store_publishing import StorePublishing
from trainsync.engines.trainer_ranks import trainer_ranks
from trainsync.runtime.context import RunContext
from trainsync.tracing.steps import StepTracer
from trainsync.weights.buckets.tensor_part import check_narrow
from trainsync.weights.proof.asking import Prover
from trainsync.weights.transports.shared_memory.segment_store import Sweeper

__all__ = ["PublishReport", "WeightPublisher"]

logger = logging.getLogger(__name__)


class WeightPublisher:
    """Publishes versions of an engine's weights, as ``spec.sync.method`` says.

        publisher = WeightPublisher(ctx, engine)
        for step in ...:
            if ctx.should_sync(step, last):
                publisher.publish(step)

    Every rank of the process group makes one, and calls it, together.

    - ``memory``: every rank uploads its own shards to Ray's object store.
    - ``nccl``: the ranks gather, and rank 0 broadcasts to the explorers.
    - ``checkpoint``: every rank saves its shards as the step's state dict in the background;
      explorers are told when the monitor has committed it; an aborted one is not waited for,
      nor does the coordinator raise that.
    - ``store``: the ranks gather, and rank 0 puts what changed into a bucket.

    Args:
        engine: verl's FSDPEngine or MegatronEngine, or what else `adapt` takes.
        coordinator: of this rank, for ``checkpoint``; pass the one that also saves checkpoints.
            None: one of its own.
        dtype: floating-point tensors that are wider travel as this one: float32 masters as
            ``torch.bfloat16``, in half the bytes. None: every tensor in its own. Refused with
            ``checkpoint``, whose files are the model as it trains.
        group: the process group of torch.distributed whose ranks hold the model; its own ranks
            alone make a publisher. None: the default one.
        prover: with ``checkpoint`` or ``store`` and a torch module, each version gets its proof,
            which costs a forward pass of the canaries on all ranks. None: servers cannot prove
            versions.
        shared_memory: with ``nccl``, explorers on the host of rank 0 read the weights in its
            /dev/shm; False: they get them over TCP, as all others do. The other methods have no
            such memory of their own, and refuse False.

    Raises:
        What `ModelUpdateGroup.create` raises; WeightsUnavailableError: also of a store that cannot
            be used.
        ValueError: deltas of Megatron's weights with ``memory``; an argument that the method does
            not take; a ``dtype`` that is not of floating point; this rank is not of the ``group``,
            or has another number in it than the ``coordinator`` has.
    """

    def __init__(
        self,
        ctx: RunContext,
        engine: Any,
        coordinator: CheckpointCoordinator | None = None,
        *,
        dtype: torch.dtype | None = None,
        group: Any = None,
        shared_memory: bool = True,
        prover: Prover | None = None,
    ) -> None:
        Sweeper().sweep()  # memory that a killed trainer left here, for every method
        check_narrow(dtype)
        method = ctx.sync.method
        self._tracer = StepTracer(ctx.incarnation)
        self._traced = {"trainsync.sync.method": method.value}
        if dtype is not None and method is SyncMethod.CHECKPOINT:
            raise ValueError(
                "with sync.method 'checkpoint' weights travel in the files that are committed, as "
                f"they train; expected no dtype, got {dtype}: ModuleEngine converts what it loads"
            )
        if not shared_memory and method is not SyncMethod.NCCL:
            raise ValueError(
                f"shared_memory=False is of sync.method 'nccl'; with {method.value!r} expected True"
            )
        if prover is not None and method not in (SyncMethod.CHECKPOINT, SyncMethod.STORE):
            raise ValueError(
                "a proof lies beside versions of sync.method 'checkpoint' and 'store'; expected no "
                f"prover with {method.value!r}"
            )
        self._method: _Method
        match method:
            case SyncMethod.MEMORY:
                self._method = _Uploading(ctx, engine, dtype, group)
            case SyncMethod.NCCL:
                self._method = _Broadcasting(ctx, engine, dtype, group, shared_memory)
            case SyncMethod.CHECKPOINT:
                self._method = _Saving(ctx, engine, coordinator, group, prover)
            case SyncMethod.STORE:
                self._method = StorePublishing(ctx, engine, dtype, group, prover)

    def publish(self, step: int) -> PublishReport:
        """Publish the weights as version ``step``; when it returns they may change.

        An explorer that did not get them is in the report, and is no error; nor is a store that is
        away. No other collective of the trainer ranks may run meanwhile.

        Args:
            step: the global step; greater than that of the last version. With ``nccl`` it may be
                the same, with the same weights: for explorers that have come since.

        Raises:
            StaleVersionError: it is not.
            TrainerRankFailedError: another rank failed or is gone. With ``checkpoint`` only before
                it saves: what fails behind the caller aborts the version, which is logged; the pace
                goes on without it.
            SupersededTrainerError: with ``store``: a newer attempt publishes; on rank 0.
            What `fsdp_upload_state_dict`, `fsdp_sync_weight_nccl` or `fsdp_save_state_dict` raise,
            for the method.
        """
        with self._tracer.span(step, "rl.sync", self._traced):
            return self._method.publish(step)

    def close(self) -> None:
        """Let go of what it holds. Explorers keep what they serve."""
        self._method.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _Method(Protocol):
    """One value of ``sync.method``."""

    def publish(self, step: int) -> PublishReport: ...

    def close(self) -> None: ...


class _Uploading:
    """The method ``memory``."""

    def __init__(self, ctx: RunContext, engine: Any, dtype: torch.dtype | None, group: Any) -> None:
        self._engine = adapt(engine)
        megatron = is_megatron(self._engine.module)
        if megatron:
            refuse_delta(ctx.sync.delta)
        self._upload = megatron_upload_state_dict if megatron else fsdp_upload_state_dict
        self._synchronizer = ctx.synchronizer()
        self._timeout = ctx.sync.timeout
        self._delta = ctx.sync.delta
        self._dtype = dtype
        self._group = group
        self._ranks = trainer_ranks(self._timeout, group)

    def publish(self, step: int) -> PublishReport:
        uploaded, problem = None, None
        try:
            uploaded = self._upload(
                self._engine,
                self._synchronizer,
                step,
                logger,
                timeout=self._timeout,
                delta=self._delta,
                dtype=self._dtype,
                group=self._group,
            )
        except Exception as error:  # noqa: BLE001 - raised by `agree`, here and there
            problem = error
        # A version that lacks a part is not published: the other ranks would not hear of it.
        self._ranks.agree("", problem, f"publishing version {step}", self._timeout)
        assert uploaded is not None, "there was no problem"
        return PublishReport(step, uploaded.seconds, uploaded.bytes, delta_off=uploaded.delta_off)

    def close(self) -> None:
        """The version stays, for explorers that come."""


class _Broadcasting:
    """The method ``nccl``: rank 0 broadcasts and tells the Synchronizer; all ranks gather."""

    def __init__(
        self,
        ctx: RunContext,
        engine: Any,
        dtype: torch.dtype | None,
        group: Any,
        shared_memory: bool,
    ) -> None:
        self._engine = engine
        self._group = ModelUpdateGroup.create(
            ctx, dtype=dtype, group=group, shared_memory=shared_memory
        )

    def publish(self, step: int) -> PublishReport:
        started = time.monotonic()
        report = fsdp_sync_weight_nccl(self._engine, self._group, step)
        seconds = time.monotonic() - started
        if report is None:
            return PublishReport(step, seconds, 0)
        return PublishReport(
            step,
            seconds,
            report.bytes,
            report.lost,
            report.refused,
            passes=report.passes,
            same_host=report.same_host,
            delta=report.delta,
            delta_bytes=report.delta_bytes,
            group=report.group,
            delta_off=report.delta_off,
        )

    def close(self) -> None:
        self._group.close()


class _Saving:
    """The method ``checkpoint``."""

    def __init__(
        self,
        ctx: RunContext,
        engine: Any,
        coordinator: CheckpointCoordinator | None,
        group: Any,
        prover: Prover | None,
    ) -> None:
        self._engine = adapt(engine)
        self._megatron = is_megatron(self._engine.module)
        check_prover(prover, self._engine)
        self._prover = prover
        self._timeout = ctx.sync.timeout
        self._own = coordinator is None
        self._ranks = trainer_ranks(self._timeout, group)
        ranks = self._ranks
        self._coordinator = coordinator or ctx.coordinator(ranks.rank, ranks.world_size)
        of = self._coordinator.rank, self._coordinator.world_size
        if of != (ranks.rank, ranks.world_size):
            raise ValueError(
                f"the coordinator is of rank {of[0]} of {of[1]}; expected that of the process "
                f"group, rank {ranks.rank} of {ranks.world_size}"
            )
        self._coordinator.tolerate(SaveKind.STATE_DICT)  # the pace does without what is aborted
        self._monitor = ctx.monitor

    def publish(self, step: int) -> PublishReport:
        started = time.monotonic()
        coordinator = self._coordinator
        before = coordinator.stats.staged_bytes
        # The step that the attempt resumed from may have its state dict from an earlier attempt.
        doing = f"registering the state dict of step {step}"
        if self._ranks.decide(lambda: self._is_committed(step), doing, self._timeout):
            logger.info("step %d: its state dict is committed already", step)
        elif self._megatron:
            megatron_save_state_dict(self._engine, "actor", step, coordinator, logger)
        else:
            proof = proof_of(self._prover, self._engine, step)
            fsdp_save_state_dict(self._engine, "actor", step, coordinator, logger, proof=proof)
        staged = coordinator.stats.staged_bytes - before
        return PublishReport(step, time.monotonic() - started, staged)

    def close(self) -> None:
        if self._own:  # else its maker waits for all its saves
            self._coordinator.wait_all(self._timeout)

    def _is_committed(self, step: int) -> bool:
        ranks = range(self._coordinator.world_size)
        component = f"{self._coordinator.component_prefix}model"
        request = SaveRequest(
            kind=SaveKind.STATE_DICT,
            step=step,
            participants=[ParticipantRef(component=component, rank=rank) for rank in ranks],
        )
        return self._monitor.register(request).state is SaveState.COMMITTED
