"""Read a run's children, from the store or from the API server."""

import asyncio

from trainsync.api import names

from trainsync_operator.builders import monitor_rbac
from trainsync_operator.builders.service import MONITOR_COMPONENT
from trainsync_operator.builders.target import MonitorSettings
from trainsync_operator.kube.kinds import (
    CLAIM,
    DEPLOYMENT,
    LEADER_WORKER_SET,
    POD,
    RAY_CLUSTER,
    RAY_JOB,
    ROLE_BINDING,
    SERVICE,
    SERVICE_ACCOUNT,
    Kind,
)
from trainsync_operator.kube.objects import Object, controller, labels, metadata, name
from trainsync_operator.reconcile import observed
from trainsync_operator.reconcile.apply.child import Owner, owner_of
from trainsync_operator.reconcile.observed import Observed
from trainsync_operator.reconcile.reads import Reads
from trainsync_operator.reconcile.run import Run
from trainsync_operator.reconcile.servers import reading as servers


async def observe(reads: Reads, run: Run, settings: MonitorSettings) -> Observed:
    """The run's existing children.

    Raises:
        ApiError: a read failed.
    """
    monitor = names.monitor_name(run.name)
    named = [
        (SERVICE_ACCOUNT, monitor),
        (ROLE_BINDING, monitor_rbac.binding_name(run.name, settings)),
        (SERVICE, monitor),
        (DEPLOYMENT, monitor),
    ]
    found = await asyncio.gather(
        *(reads.child(kind, run.namespace, child) for kind, child in named),
    )
    live = {key: obj for key, obj in zip(named, found, strict=True) if obj is not None}
    if run.spec.checkpoint.storage.volume_claim_template is not None:
        claim = names.claim_name(run.name)
        # What is applied is made from it.
        there = await reads.get(CLAIM, run.namespace, claim)
        live |= {} if there is None else {(CLAIM, claim): there}
    live |= await servers.children(reads, run)
    rays, jobs, pods = await asyncio.gather(
        reads.of_run(RAY_CLUSTER, run.namespace, run.name),
        reads.of_run(RAY_JOB, run.namespace, run.name),
        reads.of_run(POD, run.namespace, run.name),
    )
    live |= {(RAY_CLUSTER, name(obj)): obj for obj in rays}
    live |= {(RAY_JOB, name(obj)): obj for obj in jobs}

    def ours(obj: Object, kind: Kind) -> bool:
        return owner_of(obj, run, kind) is Owner.OURS

    # Labels alone would mix in the pods of an earlier run of the same name.
    our_rays = [obj for obj in rays if ours(obj, RAY_CLUSTER)]
    uids = {metadata(obj)["uid"] for obj in our_rays}
    return observed.read(
        live=live,
        ray_clusters=our_rays,
        jobs=[obj for obj in jobs if ours(obj, RAY_JOB)],
        ray_pods=[pod for pod in pods if (controller(pod) or {}).get("uid") in uids],
        monitor=live.get((DEPLOYMENT, monitor)),
        monitor_pods=[
            pod for pod in pods if labels(pod).get(names.LABEL_COMPONENT) == MONITOR_COMPONENT
        ],
        server_pods=[pod for pod in pods if servers.is_of_servers(pod)],
        makes_groups=reads.has(LEADER_WORKER_SET),
    )
