"""Makes a rank's coordinator of checkpoints, as the run says. Imports torch when called."""

from typing import TYPE_CHECKING

from trainsync.monitor.client.base import MonitorClient
from trainsync.runtime import clients
from trainsync.runtime.settings import RunSettings
from trainsync.storage.layout import RunDirectory
from trainsync.storage.permissions import open_to_group

if TYPE_CHECKING:
    from trainsync.checkpoint.coordinator import CheckpointCoordinator
    from trainsync.checkpoint.save.part import WhenFull


def open_coordinator(
    settings: RunSettings,
    monitor: MonitorClient,
    rank: int,
    world_size: int,
    *,
    when_full: "WhenFull",
    overlapped: bool,
    component_prefix: str,
) -> "CheckpointCoordinator":
    """See `RunContext.coordinator`."""
    from trainsync.checkpoint.coordinator import CheckpointCoordinator

    store = settings.store
    if store is None:
        open_to_group(RunDirectory(settings.directory))
    return CheckpointCoordinator(
        monitor,
        settings.directory if store is None else store,
        rank=rank,
        world_size=world_size,
        when_full=when_full,
        overlapped=overlapped,
        component_prefix=component_prefix,
        permits=clients.open_permits(settings, monitor),
        sync_method=settings.sync.method,
        save_timeout=settings.checkpoint.save_timeout,
        memory=settings.memory_place,
        incremental=settings.checkpoint.incremental,
    )
