"""The operator's process: leader election, store, watches, queue, workers, health."""

import asyncio
import logging
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final

from prometheus_client import CollectorRegistry
from trainsync.kube.client import connect

from trainsync_operator.builders.target import MonitorSettings
from trainsync_operator.controller.leader import Elector, Leadership
from trainsync_operator.controller.priority_boosts import PriorityBoosts
from trainsync_operator.controller.queue import WorkQueue
from trainsync_operator.controller.reflector import Source
from trainsync_operator.controller.watch import Watches
from trainsync_operator.controller.worker import resync, work
from trainsync_operator.kube.client import Api, ApiError, KubernetesApi
from trainsync_operator.kube.kinds import CHILDREN, OPTIONAL, RUN, WATCHED
from trainsync_operator.kube.store import Store
from trainsync_operator.metrics import health
from trainsync_operator.metrics.metrics import Metrics
from trainsync_operator.reconcile import directories
from trainsync_operator.reconcile.decide.preemption_cost import BoostScale
from trainsync_operator.reconcile.reconcile import Reconciler
from trainsync_operator.reconcile.run import Key
from trainsync_operator.reconcile.trimmed import trim

_LOG = logging.getLogger(__name__)
_KIND_SECONDS: Final = 5.0
# After so long runs are read from the API server until the store is there.
_SYNC_SECONDS: Final = 60.0
_SYNC_POLL_SECONDS: Final = 0.05
LEASE_NAME: Final = "trainsync-operator"


@dataclass(frozen=True)
class Options:
    """The command line."""

    monitor: MonitorSettings
    namespaces: list[str] = field(default_factory=list)
    metrics_port: int = 8080
    workers: int = 4
    leader_worker_sets: bool = False
    priority_boost: BoostScale | None = None
    leader_elect: bool = False
    lease_namespace: str = "default"
    identity: str = "trainsync-operator"


async def wait_for_kinds(api: Api, namespace: str | None) -> None:
    """Wait for the CRDs and for the right to list."""
    for kind in (RUN, *CHILDREN):
        while True:
            try:
                # One shows it; all Services of a large cluster take longer than a request may.
                await api.list(kind, namespace, limit=1)
                break
            except ApiError as error:
                _LOG.warning("%s cannot be listed yet: %s", kind.plural, error)
                await asyncio.sleep(_KIND_SECONDS)


async def _stop_signal() -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    await stopped.wait()


class _StopError(Exception):
    """The process received a signal to stop."""


async def _until_synced(store: Store) -> None:
    begun = time.monotonic()
    while not store.synced:
        if time.monotonic() - begun > _SYNC_SECONDS:
            _LOG.warning("not listed yet: %s; runs are read one by one", store.unsynced())
            return
        await asyncio.sleep(_SYNC_POLL_SECONDS)
    _LOG.info("all kinds were listed in %.1f s", time.monotonic() - begun)


async def lead(
    options: Options, api: Api, source: Source, metrics: Metrics, ready: asyncio.Event
) -> None:
    """Everything that only the leader does; ends with an exception alone."""
    await wait_for_kinds(api, options.namespaces[0] if options.namespaces else None)
    scopes: list[str | None] = [*options.namespaces] if options.namespaces else [None]
    kinds = WATCHED + (OPTIONAL if options.leader_worker_sets else ())
    store = Store(trim, scopes, kinds, directories.index)
    queue: WorkQueue[Key] = WorkQueue()
    reconciler = Reconciler(api, metrics, options.monitor, store=store, wake=queue.add)
    watches = Watches(source, store, queue.add, scopes)
    # When one task ends, all are cancelled.
    async with asyncio.TaskGroup() as group:
        group.create_task(watches.run())
        metrics.leader.set(1)
        ready.set()
        await _until_synced(store)
        for _ in range(options.workers):
            group.create_task(work(queue, reconciler, metrics))
        group.create_task(resync(queue, store))
        if options.priority_boost is not None:
            group.create_task(PriorityBoosts(api, store, options.priority_boost).run())


@asynccontextmanager
async def _elector(options: Options, metrics: Metrics) -> AsyncIterator[Elector]:
    client = await connect()
    try:
        api = KubernetesApi(client, metrics.api_request)
        yield Elector(api, options.lease_namespace, LEASE_NAME, options.identity, time.monotonic)
    finally:
        await client.close()  # type: ignore[no-untyped-call]  # kubernetes is untyped


async def run(options: Options) -> int:
    """Run until a signal (0), or until leadership is lost (1)."""
    client = await connect()
    # Each watch keeps a connection.
    watching = await connect(connections=0)
    metrics = Metrics(CollectorRegistry())
    api = KubernetesApi(client, metrics.api_request)
    source = KubernetesApi(watching, metrics.api_request)
    ready = asyncio.Event()
    server = await health.serve(
        options.metrics_port, metrics.registry, alive=lambda: True, ready=ready.is_set
    )
    leadership: Leadership | None = None
    try:
        async with asyncio.TaskGroup() as group:

            async def until_signal() -> None:
                await _stop_signal()
                raise _StopError

            group.create_task(until_signal())
            if options.leader_elect:
                ready.set()  # a follower is as ready as it can be
                leadership = Leadership(lambda: _elector(options, metrics))
                await leadership.acquire()
                group.create_task(leadership.lost())
            group.create_task(lead(options, api, source, metrics, ready))
    except* _StopError:
        _LOG.info("stopping")
        return_code = 0
    except* Exception as failed:  # noqa: BLE001 -- the process ends, with the cause in its log
        for error in failed.exceptions:
            _LOG.error("stopping: %r", error, exc_info=error)
        return_code = 1
    finally:
        if leadership is not None:
            await leadership.release()
        await server.cleanup()
        # kubernetes is untyped
        await watching.close()  # type: ignore[no-untyped-call]
        await client.close()  # type: ignore[no-untyped-call]
    return return_code
