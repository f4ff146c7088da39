"""Chooses by ``spec.sync.method`` how each side announces and fetches versions."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from trainsync.api.spec import SyncMethod
from trainsync.monitor.client.base import CommitClient, ExchangeClient, MonitorClient
from trainsync.runtime.errors import JoinError
from trainsync.runtime.relays.call_relay import CallRelay
from trainsync.runtime.relays.committed_weights import read_stored_weights, read_weights
from trainsync.runtime.relays.monitor_relays import AbortRelay, CommitRelay
from trainsync.runtime.settings import RunSettings
from trainsync.runtime.sync_store import limits_within
from trainsync.storage.objects.of_run import open_run_store
from trainsync.tracing.steps import StepTracer
from trainsync.weights.synchronizer.connection import find_group
from trainsync.weights.synchronizer.remote import RemoteSynchronizer
from trainsync.weights.transports.anchors.pool.objects import PooledObjects
from trainsync.weights.transports.anchors.source import StoreSource
from trainsync.weights.transports.base import WeightSource, meta_of
from trainsync.weights.transports.broadcast.deadlines import Deadlines, broadcast_seconds
from trainsync.weights.transports.broadcast.receiver import WeightReceiver
from trainsync.weights.transports.object_store.fetcher import MemorySource
from trainsync.weights.transports.volume.fetcher import VolumeSource
from trainsync.weights.transports.volume.stored import StoredStateDicts

if TYPE_CHECKING:
    from trainsync.weights.explorer.client import ExplorerClient

_FIND_SECONDS = 10.0  # of one question where the trainer is; it is asked again


def open_source(
    settings: RunSettings,
    explorer: str,
    synchronizer: Any,
    device: torch.device | None = None,
    expected: Mapping[str, torch.Tensor] | None = None,
    wants: Callable[[str], bool] | None = None,
) -> WeightSource:
    """The source of an explorer's bytes.

    Args:
        device, expected, wants: see `RunContext.explorer`.

    Raises:
        JoinError: ``wants`` with a method that brings every tensor to every explorer; ``memory``
            where the trainers are in another Ray cluster.
    """
    if settings.is_apart and settings.sync.method is SyncMethod.MEMORY:
        raise JoinError(
            f"sync method memory does not reach explorer {explorer} in cluster {settings.cluster}: "
            f"the trainers are in {settings.trainer_cluster}; use nccl, checkpoint or store"
        )
    if wants is not None and settings.sync.method is not SyncMethod.MEMORY:
        raise JoinError(
            f"explorer {explorer} wants some tensors only, and sync method "
            f"{settings.sync.method.value} brings all of them to each explorer; use memory"
        )
    metas = None if expected is None else [meta_of(*named) for named in expected.items()]
    if settings.sync.method is SyncMethod.CHECKPOINT and settings.store is not None:
        bucket = open_run_store(settings.store, limits_within(settings.sync.timeout))
        return StoredStateDicts(bucket, read_stored_weights, expected=metas)
    if settings.sync.method is SyncMethod.CHECKPOINT:
        return VolumeSource(settings.directory, explorer, read_weights, expected=metas)
    if settings.sync.method is SyncMethod.NCCL:
        find = find_group(synchronizer, _FIND_SECONDS)
        seconds = broadcast_seconds(settings.sync.timeout)
        deadlines = Deadlines.of(seconds, settings.sync.bucket_size)
        return WeightReceiver(explorer, find, expected=metas, deadlines=deadlines, device=device)
    if settings.sync.method is SyncMethod.STORE:
        assert settings.sync.store is not None, "read_settings has seen to it"
        bucket = settings.sync.store.open(settings.sync.timeout)
        # Without Ray, as in another cluster of the run, each explorer reads the store for itself.
        pool = PooledObjects.of(bucket, explorer, settings.ray_namespace)
        way = None if pool is None else pool.way
        return StoreSource(bucket, expected=metas, read=pool, way=way)
    return MemorySource(wants, expected=metas, delta=settings.sync.delta)


def open_explorer(
    settings: RunSettings,
    name: str,
    synchronizer: Any,
    device: torch.device | None,
    expected: Mapping[str, torch.Tensor] | None,
    wants: Callable[[str], bool] | None,
    schema_may_change: bool,
) -> "ExplorerClient":
    """See `RunContext.explorer`."""
    from trainsync.weights.explorer.client import ExplorerClient

    source = open_source(settings, name, synchronizer, device, expected, wants)
    try:
        return ExplorerClient(
            synchronizer,
            name,
            timeout=settings.sync.timeout,
            source=source,
            schema_may_change=schema_may_change,
            tracer=None if settings.incarnation is None else StepTracer(settings.incarnation),
        )
    except BaseException:
        source.close()  # else the trainer goes on to see an explorer that is not used
        raise


def remote_synchronizer(monitor: MonitorClient) -> RemoteSynchronizer:
    """The Synchronizer of trainers in another Ray cluster."""
    if not isinstance(monitor, ExchangeClient):
        raise JoinError(f"{type(monitor).__name__} passes on no calls to another Ray cluster")
    return RemoteSynchronizer(monitor)


def open_call_relay(
    settings: RunSettings, monitor: MonitorClient, synchronizer: Callable[[], Any]
) -> CallRelay | None:
    """The relay that answers explorers of other Ray clusters; None where there are none."""
    if settings.trainer_cluster is None:
        return None
    if not isinstance(monitor, ExchangeClient):
        raise JoinError(f"{type(monitor).__name__} passes on no calls of other Ray clusters")
    return CallRelay(monitor, synchronizer)


def open_relays(
    settings: RunSettings, monitor: MonitorClient, synchronizer: Callable[[], Any]
) -> tuple[CommitRelay, AbortRelay] | None:
    """The relay that tells of versions for the trainer; None where the trainer does so itself."""
    if settings.sync.method is not SyncMethod.CHECKPOINT:
        return None
    if not isinstance(monitor, CommitClient):
        raise JoinError(
            f"{type(monitor).__name__} tells of no commits, as sync method checkpoint needs"
        )
    return CommitRelay(monitor, synchronizer), AbortRelay(monitor, synchronizer)
