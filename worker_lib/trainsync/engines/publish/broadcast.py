"""The method ``nccl`` on the trainers' side: who is ready, the broadcast, its announcement."""

import logging
import secrets
import time
from collections.abc import Callable
from typing import Any, Final

import ray
import torch

from trainsync.engines.fsdp.broadcast import ModelUpdateGroup, fsdp_sync_weight_nccl
from trainsync.engines.publish.report import PublishReport
from trainsync.engines.rank_line import RankLine
from trainsync.runtime.context import RunContext
from trainsync.weights.narrowing import check_narrow
from trainsync.weights.synchronizer.connection import Connection
from trainsync.weights.synchronizer.traffic import Sent
from trainsync.weights.transports.broadcast.broadcaster import BroadcastReport, WeightBroadcaster
from trainsync.weights.transports.broadcast.deadlines import (
    Deadlines,
    broadcast_seconds,
    ready_seconds,
)
from trainsync.weights.transports.shared_memory.segment import SHARED_MEMORY
from trainsync.weights.versions import NCCL

logger = logging.getLogger(__name__)

# For explorers that are said to be connected, but to the trainer before this one; a part of
# `ready_seconds`.
_CHANGE_SECONDS: Final = 10.0
_ANSWER_SECONDS: Final = 60.0  # of the Synchronizer, which may have to be rebuilt


def announce_broadcast(
    call: Callable[..., object], report: BroadcastReport, seconds: float
) -> None:
    """Let the explorers take what they have, and log what became of the version.

    What nobody has is not announced, but the Synchronizer is told why.

    Args:
        call: of a method of the Synchronizer.
        seconds: that it has taken so far.
    """
    _log(report, seconds)
    sent = Sent(secrets.token_hex(8), report.taken, max(0, report.passes - 1))
    if report.digest is not None:
        call(
            "announce",
            report.version,
            report.digest,
            report.bytes,
            seconds,
            NCCL,
            None,
            report.lost,
            report.refused,
            True,  # the last version may have been sent once more, to those that came later
            report.served,
            sent,
        )
        return
    call("note_missed", report.version, report.lost, report.refused, sent)


def _log(report: BroadcastReport, seconds: float) -> None:
    ways = [
        f"{len(names)} {how}"
        for names, how in (
            (report.same_host, "by shared memory"),
            (report.group, "from GPU to GPU"),
            (report.delta, "by delta"),
        )
        if names
    ]
    logger.info(
        "version %d: %d bytes to %d explorers by nccl in %.3f s%s",
        report.version,
        report.bytes,
        len(report.served),
        seconds,
        f" ({', '.join(ways)})" if ways else "",
    )
    for name, cause in report.lost.items():
        logger.warning("version %d: explorer %s is lost: %s", report.version, name, cause)
    for name, cause in report.refused.items():
        logger.warning("version %d: explorer %s refused it: %s", report.version, name, cause)


class BroadcastPublishing:
    """Rank 0 broadcasts and tells the Synchronizer; the other ranks gather along.

    Every rank makes it, and calls it, together.

    Raises:
        TrainerRankFailedError: another rank could not.
        WeightsUnavailableError: the Synchronizer does not answer; on rank 0.
        SupersededTrainerError: a newer attempt broadcasts; on rank 0.
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
        check_narrow(dtype)
        self._engine = engine
        self._ready_seconds = ready_seconds(ctx.sync.timeout)
        seconds = broadcast_seconds(ctx.sync.timeout)
        deadlines = Deadlines.of(seconds, ctx.sync.bucket_size)
        self._line = RankLine(ctx.sync.timeout + 2 * _ANSWER_SECONDS, group)
        self._leading: _Leading | None = None
        doing = "setting up the broadcast of weights"
        try:
            self._line.decide(
                lambda: self._lead(ctx, deadlines, shared_memory), 2 * _ANSWER_SECONDS, doing
            )
        except BaseException:
            self.close()
            raise
        broadcaster = None if self._leading is None else self._leading.broadcaster
        self._group = ModelUpdateGroup(self._line, broadcaster, deadlines, dtype)

    def publish(self, step: int) -> PublishReport:
        """See `WeightPublisher.publish`; the last version again is for those that came later."""
        started = time.monotonic()
        waits = self._group.deadlines.whole + self._ready_seconds + _ANSWER_SECONDS
        self._line.decide(lambda: self._wait_ready(step), waits, f"publishing version {step}")
        report = fsdp_sync_weight_nccl(self._engine, self._group, step)
        self._line.decide(
            lambda: self._announce(report, time.monotonic() - started),
            2 * _ANSWER_SECONDS,
            f"announcing version {step}",
        )
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
        if self._leading is not None:
            self._leading.broadcaster.close()
        self._line.close()

    # -- on rank 0 ------------------------------------------------------------------------

    def _lead(self, ctx: RunContext, deadlines: Deadlines, shared_memory: bool) -> int:
        self._leading = _Leading(ctx, deadlines, shared_memory)
        return 0

    def _wait_ready(self, step: int) -> int:
        if self._leading is not None:
            self._leading.wait_ready(step, self._ready_seconds)
        return 0

    def _announce(self, report: BroadcastReport | None, seconds: float) -> int:
        if self._leading is not None and report is not None:
            self._leading.announce(report, seconds)
        return 0


class _Leading:
    """What rank 0 alone does."""

    def __init__(self, ctx: RunContext, deadlines: Deadlines, shared_memory: bool) -> None:
        host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self._connection = Connection(ctx.synchronizer(), _ANSWER_SECONDS)
        self.broadcaster = WeightBroadcaster(
            ctx.attempt,
            host,
            bucket_size=ctx.sync.bucket_size,
            deadlines=deadlines,
            delta=ctx.sync.delta,
            shared_memory=SHARED_MEMORY if shared_memory else None,
        )
        try:
            self._call("setup_weight_sync_group", self.broadcaster.endpoint)
        except BaseException:
            self.broadcaster.close()
            raise

    def wait_ready(self, version: int, seconds: float) -> None:
        """Until every explorer that has joined is connected; who is not in time is given up."""
        end = time.monotonic() + seconds
        ready: tuple[str, ...] = self._connection.call(
            "ready_to_nccl_sync", "trainer", version, seconds, timeout=seconds + _ANSWER_SECONDS
        )
        left = max(0.0, end - time.monotonic())
        self.broadcaster.wait_named(ready, min(left, _CHANGE_SECONDS))

    def announce(self, report: BroadcastReport, seconds: float) -> None:
        """See `announce_broadcast`."""
        announce_broadcast(self._call, report, seconds)

    def _call(self, method: str, *arguments: Any) -> None:
        self._connection.call(method, *arguments, timeout=_ANSWER_SECONDS)
