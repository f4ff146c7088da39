"""Keeps the priority boosts of Kueue's Workloads, by which Kueue preempts the cheapest run first.

Kueue 0.17 and newer, with its feature gate PriorityBoost, adds the annotation to a Workload's
priority (KEP-7990, kueue.x-k8s.io/priority-boost); older ones ignore it.
"""

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import Final

from trainsync.api import names

from trainsync_operator.builders import queue
from trainsync_operator.kube import objects
from trainsync_operator.kube.client import Api, ApiError, ApiRefusedError
from trainsync_operator.kube.kinds import RAY_CLUSTER, RUN, WORKLOAD
from trainsync_operator.kube.objects import Object
from trainsync_operator.kube.store import Store
from trainsync_operator.reconcile.decide.preemption_cost import BoostScale, priority_boost

BOOST_ANNOTATION: Final = "kueue.x-k8s.io/priority-boost"
JOB_UID_LABEL: Final = "kueue.x-k8s.io/job-uid"
# Costs change slowly, and each change is a write to the API server.
LOOK_SECONDS: Final = 30.0
# Kueue may have made a Workload anew, without the annotation.
AGAIN_SECONDS: Final = 600.0

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Written:
    boost: int
    when: float


class _NotServedError(ApiError):
    """Workloads of a namespace cannot be listed: Kueue is older or gone, or a right is missing."""


class PriorityBoosts:
    """Writes the boost of each RayCluster's Workload when it has changed.

    Args:
        scale: how much a boost is.
    """

    def __init__(self, api: Api, store: Store, scale: BoostScale) -> None:
        self._api = api
        self._store = store
        self._scale = scale
        self._written: dict[str, _Written] = {}  # by the RayCluster's uid
        self._failed: dict[str, str] = {}  # what was logged last, by the RayCluster's uid

    async def run(self, seconds: float = LOOK_SECONDS) -> None:
        """Look at all runs each ``seconds``, forever."""
        while True:
            await asyncio.sleep(seconds)
            await self.look()

    async def look(self) -> None:
        """Write what has changed. A failure is logged once, and tried again at the next look."""
        seen: set[str] = set()
        refused: set[str] = set()  # namespaces of which no Workload can be listed
        for namespace, name in self._store.names(RAY_CLUSTER):
            await asyncio.sleep(0)  # of 1,000 runs: let the workers have their turn
            ray = self._store.get(RAY_CLUSTER, namespace, name)
            if ray is None or not queue.manages(ray):
                continue
            uid = objects.metadata(ray)["uid"]
            seen.add(uid)
            if namespace in refused:
                continue
            what = f"the priority of {namespace}/{name} is not boosted"
            try:
                await self._keep(namespace, uid, ray)
            except _NotServedError as error:
                refused.add(namespace)
                self._tell(uid, f"{what}: {error}")
            except ApiError as error:
                self._tell(uid, f"{what}: {error}")
            except Exception:  # noqa: BLE001 - an odd answer of one run ends not the operator
                _LOG.exception("%s", what)
            else:
                self._failed.pop(uid, None)
        for known in (self._written, self._failed):
            for uid in known.keys() - seen:
                del known[uid]

    async def _keep(self, namespace: str, uid: str, ray: Object) -> None:
        run = self._store.get(RUN, namespace, objects.labels(ray).get(names.LABEL_RUN, ""))
        boost = 0 if run is None else priority_boost(run.get("status") or {}, self._scale)
        if self._is_due(uid, boost):
            await self._write(namespace, uid, boost)

    def _is_due(self, uid: str, boost: int) -> bool:
        last = self._written.get(uid)
        if last is None or last.boost != boost:
            return True
        return time.monotonic() - last.when > AGAIN_SECONDS

    async def _write(self, namespace: str, uid: str, boost: int) -> None:
        found = await self._find(namespace, uid)
        wanted = {BOOST_ANNOTATION: str(boost)} if boost else {}
        for workload in found:
            if objects.annotations(workload).get(BOOST_ANNOTATION) == wanted.get(BOOST_ANNOTATION):
                continue
            await self._api.apply(
                WORKLOAD,
                {
                    "apiVersion": WORKLOAD.api_version,
                    "kind": WORKLOAD.name,
                    "metadata": {
                        "name": objects.name(workload),
                        "namespace": namespace,
                        # An object that is gone is not made anew.
                        "uid": objects.metadata(workload)["uid"],
                        "annotations": wanted,
                    },
                },
            )
        # Kueue makes it a moment after the RayCluster, without a boost.
        if found or not boost:
            self._written[uid] = _Written(boost, time.monotonic())

    async def _find(self, namespace: str, uid: str) -> list[Object]:
        try:
            return await self._api.list(WORKLOAD, namespace, f"{JOB_UID_LABEL}={uid}")
        except ApiRefusedError as error:
            raise _NotServedError(str(error), error.status) from error

    def _tell(self, uid: str, failure: str) -> None:
        if self._failed.get(uid) != failure:
            self._failed[uid] = failure
            _LOG.warning("%s", failure)
