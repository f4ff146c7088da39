"""The trainer ranks of a run, as they broadcast weights: rank 0 sends, and every rank gathers.

Rank 0 has the broadcaster and a connection to the Synchronizer, which learns of each version here.
"""

import logging
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Self

import torch

from trainsync.api.spec import SyncMethod
from trainsync.dist.agreement import Agreement
from trainsync.engines.adapt import adapt
from trainsync.engines.module_engine import TrainedModule
from trainsync.engines.publish.gathering import GatherTogether
from trainsync.engines.publish.group_broadcast import broadcast_in_group, is_process_group
from trainsync.engines.publish.sent_tensors import described, narrowed, sent_tensors
from trainsync.engines.trainer_ranks import trainer_ranks
from trainsync.weights.buckets.tensor_part import check_narrow
from trainsync.weights.buckets.tensor_stream import Description, Value
from trainsync.weights.counts import BroadcastTraffic
from trainsync.weights.transports.broadcast.broadcaster import BroadcastReport, WeightBroadcaster
from trainsync.weights.transports.broadcast.deadlines import (
    Deadlines,
    broadcast_seconds,
    ready_seconds,
)
from trainsync.weights.transports.shared_memory.segment import SHARED_MEMORY
from trainsync.weights.versions import Announcement, Published

if TYPE_CHECKING:
    from trainsync.runtime.context import RunContext
    from trainsync.weights.synchronizer.connection import SynchronizerConnection

logger = logging.getLogger(__name__)

# For explorers that are said to be connected, but to the trainer before this one; a part of
# `ready_seconds`.
_CHANGE_SECONDS: Final = 10.0
# The Synchronizer may have to be rebuilt before it answers.
_ANSWER_SECONDS: Final = 60.0


@dataclass(frozen=True)
class ModelUpdateGroup:
    """The trainer ranks of one run, as they broadcast weights. Every rank makes one, by `create`::

        group = trainsync.ModelUpdateGroup.create(ctx)
        report = trainsync.fsdp_sync_weight_nccl(engine, group, step)

    Attributes:
        ranks: messages between the trainer ranks, which all made it together.
        broadcaster: on rank 0; None on the others.
        deadlines: those of the broadcaster, equal on all ranks.
        dtype: floating-point tensors that are wider travel as this one; None: all in their own.
        ready_seconds: how long a broadcast waits for the run's explorers; None: the group knows no
            run, and its maker waits for explorers and tells them of the version.
        connection: rank 0's, to the run's Synchronizer; None on the others, and without a run.
    """

    ranks: Agreement
    broadcaster: WeightBroadcaster | None
    deadlines: Deadlines
    dtype: torch.dtype | None = None
    ready_seconds: float | None = None
    connection: "SynchronizerConnection | None" = None

    def __post_init__(self) -> None:
        check_narrow(self.dtype)
        if (self.broadcaster is not None) != (self.ranks.rank == 0):
            raise ValueError(
                f"rank {self.ranks.rank} has {'a' if self.broadcaster else 'no'} broadcaster; "
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
        if ctx.sync.method is not SyncMethod.NCCL:
            raise ValueError(
                f"sync.method of run {ctx.run} is {ctx.sync.method.value}, by which its explorers "
                "take weights; expected nccl for a ModelUpdateGroup, or WeightPublisher, which "
                "goes by the run's method"
            )
        check_narrow(dtype)
        seconds = broadcast_seconds(ctx.sync.timeout)
        deadlines = Deadlines.of(seconds, ctx.sync.bucket_size)
        ranks = trainer_ranks(ctx.sync.timeout + 2 * _ANSWER_SECONDS, group)
        made: list[tuple[WeightBroadcaster, SynchronizerConnection]] = []

        def set_up() -> int:
            made.append(_broadcaster_of(ctx, deadlines, shared_memory))
            return 0

        try:
            ranks.decide(set_up, "setting up the broadcast of weights", 2 * _ANSWER_SECONDS)
        except BaseException:
            for broadcaster, _ in made:
                broadcaster.close()
            raise
        return cls(
            ranks,
            made[0][0] if made else None,
            deadlines,
            dtype,
            ready_seconds(ctx.sync.timeout),
            made[0][1] if made else None,
        )

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

        def wait() -> None:
            if self.connection is None or self.broadcaster is None:
                return
            sends = self.broadcaster.version + 1 if version is None else version
            end = time.monotonic() + seconds
            ready: tuple[str, ...] = self.connection.call(
                "ready_to_nccl_sync", "trainer", sends, seconds, timeout=seconds + _ANSWER_SECONDS
            )
            left = max(0.0, end - time.monotonic())
            self.broadcaster.wait_named(ready, min(left, _CHANGE_SECONDS))

        self._on_rank_0(
            wait, self.deadlines.whole + seconds + _ANSWER_SECONDS, _publishing(version)
        )

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
            if self.connection is not None and report is not None:
                call = partial(self.connection.call, timeout=_ANSWER_SECONDS)
                announce_broadcast(call, report, seconds)

        doing = "announcing " + ("a version" if report is None else f"version {report.version}")
        self._on_rank_0(tell, 2 * _ANSWER_SECONDS, doing)

    def close(self) -> None:
        """Let the explorers go, which keep what they serve; the group is of no more use."""
        if self.broadcaster is not None:
            self.broadcaster.close()

    def _on_rank_0(self, act: Callable[[], None], seconds: float, doing: str) -> None:
        def chosen() -> int:
            act()
            return 0

        self.ranks.decide(chosen, doing, seconds)


def fsdp_sync_weight_nccl(
    engine: Any, model_update_group: Any, global_step: int | None = None
) -> BroadcastReport | None:
    """Broadcast the engine's weights as version ``global_step`` to every connected explorer.

    The last version again, with the same weights, is for explorers that have connected since.

    Every rank calls it. The weights are gathered one at a time, or of large ones a part of 4 MiB
    (see `sent_tensors`), the next while the last is on the wire, and once more for every pass that
    the broadcaster needs. Once every rank has come, within
    ``deadlines.whole``, it is over within ``deadlines.whole + deadlines.connect`` and 5 s more,
    also when a rank dies or stops; with a group of `ModelUpdateGroup.create` the time to wait for
    explorers and to tell them comes besides. The weights must not change before it returns.

    Args:
        engine: see `adapt`; verl's engines gather whole tensors by themselves.
        model_update_group: of `ModelUpdateGroup.create`; or a process group of torch whose rank 0
            is trainer rank 0 (other trainer ranks, which are no members, give None): see
            `broadcast_in_group`, which knows no versions.
        global_step: the same on all ranks; None: the version after the last one.

    Returns:
        On rank 0 how it went; an explorer that was lost is no error. None on the other ranks, and
        with a process group.

    Raises:
        TrainerRankFailedError: another rank failed, or is gone; says which, if it could say so.
        GatherFailedError: a weight could not be gathered on this rank.
        StaleVersionError, SupersededTrainerError, UnsupportedWeightsError: on rank 0, see
            `WeightBroadcaster.broadcast`.
        TypeError: ``model_update_group`` is neither, or a process group and there is a
            ``global_step``.
    """
    if not isinstance(model_update_group, ModelUpdateGroup):
        if not is_process_group(model_update_group):
            raise TypeError(
                f"model_update_group is a {type(model_update_group).__name__}; expected "
                "ModelUpdateGroup.create(ctx), or a process group of torch with trainer rank 0"
            )
        if global_step is not None:
            raise TypeError(
                f"global_step is {global_step}, and a process group knows no versions; expected "
                "ModelUpdateGroup.create(ctx) for versions, or no global_step"
            )
        broadcast_in_group(engine, model_update_group)
        return None
    started = time.monotonic()
    model_update_group.wait_ready(global_step)
    report = _broadcast(engine, model_update_group, global_step)
    model_update_group.announce(report, time.monotonic() - started)
    return report


def _broadcast(
    engine: Any, group: ModelUpdateGroup, global_step: int | None
) -> BroadcastReport | None:
    def gather() -> Iterator[tuple[str, Value]]:
        return whole_tensors(engine, group.dtype, group.ranks.root)

    def describe() -> Description | None:
        trained = adapt(engine)
        if isinstance(trained, TrainedModule):
            return described(trained.module, trained.lora, group.dtype)
        return None

    together = GatherTogether(gather, group.ranks, group.deadlines, _publishing(global_step))
    broadcaster = group.broadcaster
    if broadcaster is None:
        together.follow()
        return None
    version = broadcaster.version + 1 if global_step is None else global_step
    if version == broadcaster.version:
        return together.lead(broadcaster.catch_up)
    return together.lead(lambda tensors: broadcaster.broadcast(version, tensors, describe=describe))


def whole_tensors(engine: Any, dtype: torch.dtype | None, root: int) -> Iterator[tuple[str, Value]]:
    """The engine's weights in full, on the root; all ranks iterate, as with `sent_tensors`.

    Args:
        engine, dtype: see `WeightPublisher`.
        root: the rank that gets them, as the default group numbers it.
    """
    trained = adapt(engine)
    if isinstance(trained, TrainedModule):
        return sent_tensors(trained.module, trained.lora, dtype, root)
    return narrowed(trained.get_per_tensor_param(), dtype)


def _publishing(version: int | None) -> str:
    """The operation, for error messages."""
    return f"publishing {'the next version' if version is None else f'version {version}'}"


def _broadcaster_of(
    ctx: "RunContext", deadlines: Deadlines, shared_memory: bool
) -> "tuple[WeightBroadcaster, SynchronizerConnection]":
    """The broadcaster of a run, which its Synchronizer then knows; for rank 0.

    Raises:
        WeightsUnavailableError: the Synchronizer does not answer.
        SupersededTrainerError: a newer attempt broadcasts.
    """
    import ray  # a group without a run does without Ray

    from trainsync.weights.synchronizer.connection import SynchronizerConnection

    host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]  # Ray is untyped
    connection = SynchronizerConnection(ctx.synchronizer(), _ANSWER_SECONDS)
    broadcaster = WeightBroadcaster(
        ctx.attempt,
        host,
        bucket_size=ctx.sync.bucket_size,
        deadlines=deadlines,
        delta=ctx.sync.delta,
        shared_memory=SHARED_MEMORY if shared_memory else None,
    )
    try:
        endpoint = broadcaster.endpoint
        connection.call("setup_weight_sync_group", endpoint, timeout=_ANSWER_SECONDS)
    except BaseException:
        broadcaster.close()
        raise
    return broadcaster, connection


def announce_broadcast(
    call: Callable[..., object], report: BroadcastReport, seconds: float
) -> None:
    """Announce a version to the explorers that have its bytes, and log how it went.

    A version that no explorer has is not announced; the Synchronizer learns why.

    Args:
        call: of a method of the Synchronizer.
        seconds: that it has taken so far.
    """
    _log(report, seconds)
    sent = BroadcastTraffic(secrets.token_hex(8), report.taken, max(0, report.passes - 1))
    if report.digest is not None:
        announcement = Announcement(
            Published.broadcast(report.version, report.digest, report.bytes),
            seconds,
            report.lost,
            report.refused,
            report.served,
            sent,
            again=True,  # the last version may have been sent once more, to late explorers
        )
        call("announce", announcement)
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
