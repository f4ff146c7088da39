"""What ``spec.sync.method`` asks of each side: how versions get announced, and how fetched."""

from collections.abc import Callable
from typing import Any

import torch

from trainsync.api.spec import SyncMethod
from trainsync.monitor.client import CommitClient, MonitorClient
from trainsync.runtime.commit_relay import CommitRelay
from trainsync.runtime.errors import JoinError
from trainsync.runtime.settings import RunSettings
from trainsync.runtime.volume_weights import read_weights
from trainsync.weights.broadcast_source import BroadcastSource, find_group
from trainsync.weights.checkpoint_source import CheckpointSource
from trainsync.weights.deadlines import Deadlines
from trainsync.weights.memory_source import MemorySource
from trainsync.weights.sources import WeightSource

_FIND_SECONDS = 10.0  # of one question where the trainer is; it is asked again


def open_source(
    settings: RunSettings, explorer: str, synchronizer: Any, device: torch.device | None = None
) -> WeightSource:
    """Where an explorer gets bytes from.

    Args:
        device: see `RunContext.explorer`.
    """
    if settings.sync.method is SyncMethod.CHECKPOINT:
        return CheckpointSource(settings.directory, explorer, read_weights)
    if settings.sync.method is SyncMethod.NCCL:
        find = find_group(synchronizer, _FIND_SECONDS)
        deadlines = Deadlines.of(settings.sync.timeout, settings.sync.bucket_size)
        return BroadcastSource(explorer, find, deadlines=deadlines, device=device)
    return MemorySource(delta=settings.sync.delta)


def open_relay(
    settings: RunSettings, monitor: MonitorClient, synchronizer: Callable[[], Any]
) -> CommitRelay | None:
    """What announces versions for the trainer; None where the trainer does so itself."""
    if settings.sync.method is not SyncMethod.CHECKPOINT:
        return None
    if not isinstance(monitor, CommitClient):
        raise JoinError(
            f"{type(monitor).__name__} tells of no commits, as sync method checkpoint needs"
        )
    return CommitRelay(monitor, synchronizer)
