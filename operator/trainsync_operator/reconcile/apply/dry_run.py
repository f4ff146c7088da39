"""Whether the children of an edited spec can be made, found out before the attempt ends for it."""

import copy
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from trainsync.api import names

from trainsync_operator.kube import objects
from trainsync_operator.kube.client import ApiError, ApiRefusedError
from trainsync_operator.kube.kinds import RAY_CLUSTER, RAY_JOB, Kind
from trainsync_operator.kube.objects import Object
from trainsync_operator.reconcile.apply.rejected_requests import AGAIN_SECONDS, RejectedRequests
from trainsync_operator.reconcile.observed import Observed
from trainsync_operator.reconcile.plan import Plan
from trainsync_operator.reconcile.reads import Live, Reads
from trainsync_operator.reconcile.run import Problem, Run

REFUSED: Final = "Refused"
_NO_EFFECT: Final = "Until it is mended, nothing of the edit takes effect, and the run goes on."
# The kind is missing, or another write was quicker: neither tells anything of the spec.
_NOT_OF_THE_SPEC: Final = (404, 409)
# Nor do these: the old RayCluster has the new one's place in a quota, or a webhook is too old.
_NOT_TOLD: Final = ("exceeded quota", "does not support dry run")


@dataclass
class DryRuns:
    """Tries what an edit needs, and remembers for a while what was refused."""

    # By namespace and run.
    _rejected: dict[tuple[str, str], RejectedRequests] = field(default_factory=dict)

    async def problem(
        self, run: Run, todo: Plan, observed: Observed, now: datetime, reads: Reads
    ) -> Problem | None:
        """The reason that ``todo`` cannot be made; None where it can, or ``reads`` cannot ask.

        Raises:
            ApiError: the API server was not reached, or cannot tell.
        """
        if todo.problem is not None:
            message = todo.problem.message.removesuffix(".")
            return Problem(todo.problem.reason, f"{message}. {_NO_EFFECT}")
        rejected = self._rejected.setdefault((run.namespace, run.name), RejectedRequests())
        new = _new(todo, observed)
        asked = " ".join(
            [run.uid, *(objects.annotations(obj)[names.ANNOTATION_HASH] for _, obj in new)]
        )
        known = rejected.known("edit", asked, now)
        if known is not None or not isinstance(reads, Live) or not reads.lists_live:
            return known
        for kind, obj in new:
            try:
                await reads.try_apply(kind, obj)
            except ApiError as error:
                if not isinstance(error, ApiRefusedError) or error.status in _NOT_OF_THE_SPEC:
                    error.at_most = AGAIN_SECONDS  # the attempt goes on, and is to be observed
                    raise
                if any(text in str(error) for text in _NOT_TOLD):
                    continue
                message = f"The API server refuses the edit of the spec: {error}. {_NO_EFFECT}"
                return rejected.note("edit", asked, Problem(REFUSED, message), now)
        return None

    def gone(self, namespace: str, run: str) -> None:
        """Forget a run."""
        self._rejected.pop((namespace, run), None)


def _new(todo: Plan, observed: Observed) -> list[tuple[Kind, Object]]:
    """RayClusters and jobs that ``todo`` makes, as they are tried."""
    clusters = [(kind, obj) for kind, obj in todo.ensure if kind is RAY_CLUSTER]
    there = observed.live
    new = [(kind, obj) for kind, obj in clusters if (kind, objects.name(obj)) not in there]
    for kind, obj in todo.jobs:
        if (RAY_JOB, objects.name(obj)) not in there:
            new.append((kind, _as_tried(obj, observed)))
    return new


def _as_tried(job: Object, observed: Observed) -> Object:
    """The job with a controller that there is: Kueue's webhook refuses one whose is not made yet.

    That is the present RayCluster, so that webhooks judge a job of the same queue.
    """
    tried = copy.deepcopy(job)
    owners, cluster = tried["metadata"]["ownerReferences"], objects.labels(job)[names.LABEL_CLUSTER]
    present = next((ray for ray in observed.ray_clusters if ray.cluster == cluster), None)
    for owner in [owner for owner in owners if not owner["uid"]]:
        if present is None:
            owners.remove(owner)
        else:
            owner |= {"name": present.name, "uid": present.uid}
    return tried
