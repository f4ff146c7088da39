"""The trainers' side of verl's backend: all ranks gather, rank 0 sends."""

import logging
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

import ray
import torch

from trainsync.api import env
from trainsync.engines.errors import GatherFailedError
from trainsync.engines.publish.gathering import GatherAhead, GatherAlong
from trainsync.integrations.verl.kept_weights import KeptWeights
from trainsync.integrations.verl.options import SyncOptions
from trainsync.weights.errors import WeightsUnavailableError
from trainsync.weights.transports.broadcast.broadcaster import (
    BroadcastReport,
    TrainerEndpoint,
    WeightBroadcaster,
)
from trainsync.weights.transports.shared_memory.segment import SHARED_MEMORY

logger = logging.getLogger(__name__)

Weights = Iterable[tuple[str, torch.Tensor]]

_LATE_SECONDS: Final = 5.0  # longer than a broadcaster's own delay


@dataclass(frozen=True)
class SendReport:
    """Result of one synchronisation.

    Attributes:
        broadcast: the broadcaster's report.
        lost: rollouts without the weights, with the cause.
        seconds: duration, with the wait for connections.
    """

    broadcast: BroadcastReport
    seconds: float
    lost: dict[str, str] = field(default_factory=dict)

    def metrics(self) -> dict[str, float]:
        """Metrics under verl's names."""
        prefix = "trainsync/weight_sync"
        return {
            f"{prefix}/seconds": self.seconds,
            f"{prefix}/bytes": float(self.broadcast.bytes),
            f"{prefix}/passes": float(self.broadcast.passes),
            f"{prefix}/delta_bytes": float(self.broadcast.delta_bytes),
            f"{prefix}/served": float(len(self.broadcast.served)),
            f"{prefix}/lost": float(len(self.lost)),
        }


class Sender:
    """The first trainer rank's links and copy of the weights, kept between synchronisations.

    Rollouts stay connected and keep the schema, so the next version starts at once.
    """

    def __init__(self, options: SyncOptions) -> None:
        self._deadlines = options.deadlines
        self._kept = KeptWeights(options.dtype)
        host: str = options.host or ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self._broadcaster = WeightBroadcaster(
            int(os.environ.get(env.ATTEMPT, 0)),
            host,
            bucket_size=options.bucket_size,
            deadlines=options.deadlines,
            shared_memory=SHARED_MEMORY if options.same_host else None,
            delta=options.delta,
        )

    @property
    def endpoint(self) -> TrainerEndpoint:
        """The address to which rollouts connect."""
        return self._broadcaster.endpoint

    @property
    def version(self) -> int:
        """The last version sent; -1 before the first."""
        return self._broadcaster.version

    def send(self, weights: Weights, version: int, rollouts: list[str]) -> SendReport:
        """Send ``version`` to ``rollouts``; ends within the deadlines even if rollouts die.

        Args:
            weights: read once and to the end, since the other ranks gather too.

        Raises:
            WeightsUnavailableError: no rollout got the weights.
            GatherFailedError: a weight could not be gathered in time.
        """
        started = time.monotonic()
        gathered = GatherAhead(lambda: iter(weights), self._deadlines.bucket)
        self._kept.begin(gathered)
        problem: BaseException | None = None
        try:
            self._broadcaster.wait_connected(rollouts, self._deadlines.connect)
            report = self._broadcaster.broadcast(version, self._kept, only=rollouts)
        except BaseException as error:
            problem = error
            raise
        finally:
            _drain(gathered, self._deadlines.whole, problem)
        gone = {**self._broadcaster.quarantined(), **report.lost, **report.refused}
        lost = {
            name: gone.get(name, "it did not connect")
            for name in rollouts
            if name not in report.served
        }
        for name, cause in lost.items():
            logger.warning("rollout %s did not get version %d: %s", name, version, cause)
        if rollouts and not report.served:
            raise WeightsUnavailableError(
                f"none of {len(rollouts)} rollouts got version {version}: {lost[rollouts[0]]}"
            )
        return SendReport(report, time.monotonic() - started, lost)

    def close(self) -> None:
        """Close the links to the rollouts."""
        self._broadcaster.close()


def gather_along(weights: Weights, options: SyncOptions) -> None:
    """On the other trainer ranks: take part in the gather and drop the tensors.

    Raises:
        GatherFailedError: a weight could not be gathered, or the deadline passed.
    """
    along = GatherAlong(lambda: iter(weights))
    seconds = options.deadlines.whole + options.deadlines.connect + _LATE_SECONDS
    if not along.wait(seconds):
        raise GatherFailedError(f"the weights were not gathered within {seconds:.3g} s")
    if along.problem is not None:
        raise along.problem


def _drain(
    gathered: GatherAhead[torch.Tensor], seconds: float, problem: BaseException | None
) -> None:
    """Finish an interrupted gather, so that no other rank waits in it."""
    try:
        gathered.drain(seconds)
    except GatherFailedError as error:
        if problem is None:
            raise
        problem.add_note(str(error))
