"""What trainer rank 0 does around a broadcast: who is ready, and what the Synchronizer hears."""

import logging
import secrets
import time
from collections.abc import Callable
from typing import Any, Final

import ray

from trainsync.runtime.context import RunContext
from trainsync.weights.synchronizer.connection import Connection
from trainsync.weights.synchronizer.traffic import Sent
from trainsync.weights.transports.broadcast.broadcaster import BroadcastReport, WeightBroadcaster
from trainsync.weights.transports.broadcast.deadlines import Deadlines
from trainsync.weights.transports.shared_memory.segment import SHARED_MEMORY
from trainsync.weights.versions import Announcement, Published

logger = logging.getLogger(__name__)

# For explorers that are said to be connected, but to the trainer before this one; a part of
# `ready_seconds`.
_CHANGE_SECONDS: Final = 10.0
ANSWER_SECONDS: Final = 60.0
"""How long the Synchronizer may take to answer: it may have to be rebuilt."""


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


class Leading:
    """The broadcaster of a run, known to its Synchronizer. Rank 0 alone has one.

    Raises:
        WeightsUnavailableError: the Synchronizer does not answer.
        SupersededTrainerError: a newer attempt broadcasts.
    """

    def __init__(self, ctx: RunContext, deadlines: Deadlines, shared_memory: bool) -> None:
        host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self._connection = Connection(ctx.synchronizer(), ANSWER_SECONDS)
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
            "ready_to_nccl_sync", "trainer", version, seconds, timeout=seconds + ANSWER_SECONDS
        )
        left = max(0.0, end - time.monotonic())
        self.broadcaster.wait_named(ready, min(left, _CHANGE_SECONDS))

    def announce(self, report: BroadcastReport, seconds: float) -> None:
        """See `announce_broadcast`."""
        announce_broadcast(self._call, report, seconds)

    def _call(self, method: str, *arguments: Any) -> None:
        self._connection.call(method, *arguments, timeout=ANSWER_SECONDS)
