"""Reads the children of servers."""

import asyncio
from typing import Final

from trainsync.api import names

from trainsync_operator.builders.servers.pod import COMPONENT
from trainsync_operator.kube import objects
from trainsync_operator.kube.kinds import BUDGET, DEPLOYMENT, SERVICE, Kind
from trainsync_operator.kube.objects import Object
from trainsync_operator.reconcile.reads import Reads
from trainsync_operator.reconcile.run import Run

KINDS: Final = (SERVICE, BUDGET, DEPLOYMENT)


async def children(reads: Reads, run: Run) -> dict[tuple[Kind, str], Object]:
    """Those of the entries of the spec, and of entries that it has no more.

    Raises:
        ApiError: a read failed.
    """
    named = [
        (kind, names.server_name(run.name, server.name)) for server in run.servers for kind in KINDS
    ]
    # A run that never had servers costs no request.
    has_any = bool(run.servers or run.status.get("servers"))
    known, found = await asyncio.gather(
        asyncio.gather(*(reads.known(k, run.namespace, run.name, ask=has_any) for k in KINDS)),
        asyncio.gather(*(reads.child(kind, run.namespace, name) for kind, name in named)),
    )
    live = {
        (kind, objects.name(obj)): obj
        for kind, listed in zip(KINDS, known, strict=True)
        for obj in listed
        if is_of_servers(obj)
    }
    return live | {key: obj for key, obj in zip(named, found, strict=True) if obj is not None}


def is_of_servers(obj: Object) -> bool:
    """Whether an object's label says that it belongs to servers."""
    return objects.labels(obj).get(names.LABEL_COMPONENT) == COMPONENT
