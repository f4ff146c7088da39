"""Reads the children of servers."""

import asyncio
from typing import Final

from trainsync.api import names

from trainsync_operator.builders.servers.pod import COMPONENT
from trainsync_operator.kube import objects
from trainsync_operator.kube.client import ApiRefusedError
from trainsync_operator.kube.kinds import BUDGET, DEPLOYMENT, LEADER_WORKER_SET, SERVICE, Kind
from trainsync_operator.kube.objects import Object
from trainsync_operator.reconcile.reads import Reads
from trainsync_operator.reconcile.run import Run

KINDS: Final = (SERVICE, BUDGET, DEPLOYMENT, LEADER_WORKER_SET)
# Those that have pods.
WORKLOADS: Final = (DEPLOYMENT, LEADER_WORKER_SET)
# Of a kind that is not served, or without a right to it.
_WITHOUT: Final = (403, 404)


async def children(reads: Reads, run: Run) -> dict[tuple[Kind, str], Object]:
    """Those of the entries of the spec, and of entries that it has no more.

    Raises:
        ApiError: a read failed.
    """
    kinds = [kind for kind in KINDS if kind is not LEADER_WORKER_SET or reads.has(kind)]
    named = [
        (kind, names.server_name(run.name, server.name)) for server in run.servers for kind in kinds
    ]
    # A run that never had servers costs no request.
    has_any = bool(run.servers or run.status.get("servers"))
    known, found = await asyncio.gather(
        asyncio.gather(*(_known(reads, kind, run, ask=has_any) for kind in kinds)),
        asyncio.gather(*(_child(reads, kind, run, name) for kind, name in named)),
    )
    live = {
        (kind, objects.name(obj)): obj
        for kind, listed in zip(kinds, known, strict=True)
        for obj in listed
        if is_of_servers(obj)
    }
    return live | {key: obj for key, obj in zip(named, found, strict=True) if obj is not None}


async def _known(reads: Reads, kind: Kind, run: Run, *, ask: bool) -> list[Object]:
    try:
        return await reads.known(kind, run.namespace, run.name, ask=ask)
    except ApiRefusedError as error:
        if kind is LEADER_WORKER_SET and error.status in _WITHOUT:
            return []  # its apply is refused, too, and the status tells of that
        raise


async def _child(reads: Reads, kind: Kind, run: Run, name: str) -> Object | None:
    try:
        return await reads.child(kind, run.namespace, name)
    except ApiRefusedError as error:
        if kind is LEADER_WORKER_SET and error.status in _WITHOUT:
            return None
        raise


def is_of_servers(obj: Object) -> bool:
    """Whether an object's label says that it belongs to servers."""
    return objects.labels(obj).get(names.LABEL_COMPONENT) == COMPONENT
