"""The method ``nccl`` on the trainers' side."""

import time
from typing import Any

import torch

from trainsync.engines.fsdp.broadcast import fsdp_sync_weight_nccl
from trainsync.engines.publish.model_update_group import ModelUpdateGroup
from trainsync.engines.publish.report import PublishReport
from trainsync.runtime.context import RunContext


class BroadcastPublishing:
    """Rank 0 broadcasts and tells the Synchronizer; the other ranks gather along.

    Every rank makes it, and calls it, together.

    Raises:
        What `ModelUpdateGroup.create` raises.
        ValueError: of ``dtype`` or ``group``.

    Args:
        dtype, group, shared_memory: see `WeightPublisher`.
    """

    def __init__(
        self,
        ctx: RunContext,
        engine: Any,
        *,
        dtype: torch.dtype | None = None,
        group: Any = None,
        shared_memory: bool = True,
    ) -> None:
        self._engine = engine
        self._group = ModelUpdateGroup.create(
            ctx, dtype=dtype, group=group, shared_memory=shared_memory
        )

    def publish(self, step: int) -> PublishReport:
        """See `WeightPublisher.publish`; the last version again is for those that came later."""
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
        """Let the explorers go; they keep what they serve."""
        self._group.close()
