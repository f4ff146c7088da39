"""The trainer ranks of a run, as they broadcast weights together."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import torch

from trainsync.api.spec import SyncMethod
from trainsync.engines.rank_line import RankLine
from trainsync.weights.buckets.narrowing import check_narrow
from trainsync.weights.transports.broadcast.broadcaster import BroadcastReport, WeightBroadcaster
from trainsync.weights.transports.broadcast.deadlines import (
    Deadlines,
    broadcast_seconds,
    ready_seconds,
)

if TYPE_CHECKING:
    from trainsync.engines.publish.leading import Leading
    from trainsync.runtime.context import RunContext


@dataclass(frozen=True)
class ModelUpdateGroup:
    """The trainer ranks of one run, as they broadcast weights. Every rank makes one, by `create`::

        group = trainsync.ModelUpdateGroup.create(ctx)
        report = trainsync.fsdp_sync_weight_nccl(engine, group, step)

    Attributes:
        line: made by all ranks together.
        broadcaster: on rank 0; None on the others.
        deadlines: those of the broadcaster, equal on all ranks.
        dtype: floating-point tensors that are wider travel as this one; None: all in their own.
        ready_seconds: how long a broadcast waits for the run's explorers; None: the group knows no
            run, and whoever made it waits for explorers and tells them of the version.
        leading: what rank 0 has of the run.
    """

    line: RankLine
    broadcaster: WeightBroadcaster | None
    deadlines: Deadlines
    dtype: torch.dtype | None = None
    ready_seconds: float | None = None
    leading: "Leading | None" = None

    def __post_init__(self) -> None:
        check_narrow(self.dtype)
        if (self.broadcaster is not None) != (self.line.rank == 0):
            raise ValueError(
                f"rank {self.line.rank} has {'a' if self.broadcaster else 'no'} broadcaster; "
                "expected one on rank 0 alone"
            )

    @classmethod
    def create(
        cls,
        ctx: "RunContext",
        *,
        dtype: torch.dtype | None = None,
        group: Any = None,
        shared_memory: bool = True,
    ) -> Self:
        """The group of a run whose ``sync.method`` is ``nccl``; Ray must be initialised.

        Every rank of the process group calls it. Explorers are the run's: they connect by
        ``ctx.explorer(name)``, and `fsdp_sync_weight_nccl` waits for those that have joined, sends
        them the version and lets them take it.

        Args:
            dtype, group, shared_memory: see `WeightPublisher`.

        Raises:
            ValueError: the run's method is another, by which its explorers would get nothing; or
                of ``dtype`` or ``group``.
            TrainerRankFailedError: another rank could not.
            WeightsUnavailableError: the Synchronizer does not answer; on rank 0.
            SupersededTrainerError: a newer attempt broadcasts; on rank 0.
        """
        from trainsync.engines.publish.leading import ANSWER_SECONDS, Leading

        if ctx.sync.method is not SyncMethod.NCCL:
            raise ValueError(
                f"sync.method of run {ctx.run} is {ctx.sync.method.value}, by which its explorers "
                "take weights; expected nccl for a ModelUpdateGroup, or WeightPublisher, which "
                "goes by the run's method"
            )
        check_narrow(dtype)
        seconds = broadcast_seconds(ctx.sync.timeout)
        deadlines = Deadlines.of(seconds, ctx.sync.bucket_size)
        line = RankLine(ctx.sync.timeout + 2 * ANSWER_SECONDS, group)
        made: list[Leading] = []

        def lead() -> int:
            made.append(Leading(ctx, deadlines, shared_memory))
            return 0

        try:
            line.decide(lead, 2 * ANSWER_SECONDS, "setting up the broadcast of weights")
        except BaseException:
            for one in made:
                one.broadcaster.close()
            line.close()
            raise
        leading = made[0] if made else None
        broadcaster = None if leading is None else leading.broadcaster
        return cls(line, broadcaster, deadlines, dtype, ready_seconds(ctx.sync.timeout), leading)

    def wait_ready(self, version: int | None) -> None:
        """Until every explorer of the run has connected, or is given up; on all ranks together.

        Args:
            version: that is to be sent; None: the one after the last.

        Raises:
            TrainerRankFailedError: another rank failed, or is gone.
            WeightsUnavailableError: the Synchronizer does not answer; on rank 0.
        """
        seconds = self.ready_seconds
        if seconds is None:
            return
        doing = f"publishing {'the next version' if version is None else f'version {version}'}"

        def wait() -> None:
            if self.leading is not None and self.broadcaster is not None:
                next_one = self.broadcaster.version + 1 if version is None else version
                self.leading.wait_ready(next_one, seconds)

        self._on_rank_0(wait, self.deadlines.whole + seconds + self._answer_seconds, doing)

    def announce(self, report: BroadcastReport | None, seconds: float) -> None:
        """Let the run's explorers take what they have; on all ranks together.

        Args:
            report: on rank 0; None on the others.
            seconds: that it took.

        Raises:
            As `wait_ready`.
        """
        if self.ready_seconds is None:
            return

        def tell() -> None:
            if self.leading is not None and report is not None:
                self.leading.announce(report, seconds)

        doing = "announcing " + ("a version" if report is None else f"version {report.version}")
        self._on_rank_0(tell, 2 * self._answer_seconds, doing)

    def close(self) -> None:
        """Let the explorers go, which keep what they serve; the group is of no more use."""
        if self.broadcaster is not None:
            self.broadcaster.close()
        self.line.close()

    @property
    def _answer_seconds(self) -> float:
        from trainsync.engines.publish.leading import ANSWER_SECONDS

        return ANSWER_SECONDS

    def _on_rank_0(self, act: Callable[[], None], seconds: float, doing: str) -> None:
        def chosen() -> int:
            act()
            return 0

        self.line.decide(chosen, seconds, doing)
