"""Apply one child, only if it differs from the desired object and belongs to the run."""

from collections.abc import Callable
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

from trainsync.api import names
from trainsync.api.quantities import same_amount

from trainsync_operator.builders import queue
from trainsync_operator.kube import objects
from trainsync_operator.kube.kinds import CLAIM, RAY_CLUSTER, RAY_JOB, RUN, Kind
from trainsync_operator.kube.objects import Object
from trainsync_operator.reconcile.reads import Reads
from trainsync_operator.reconcile.run import QUEUE_LABEL, Run


class NameTakenError(Exception):
    """An object that does not belong to the run has the name of a child."""


class LeftoverError(Exception):
    """A child, of this run or of an earlier one of the same name, is still going; wait.

    Args:
        since: when it should have been gone, None where its deletion has not begun.
    """

    reason = "Deleting"

    def __init__(self, message: str, since: datetime | None) -> None:
        super().__init__(message)
        self.since = since


class ClaimTerminatingError(LeftoverError):
    """The run's claim is being deleted, which ends when no pod uses it any more."""

    reason = "ClaimTerminating"


class Owner(StrEnum):
    """The owner of an object."""

    OURS = "ours"
    LEFTOVER = "leftover"
    FOREIGN = "foreign"


def owner_of(obj: Object, run: Run, kind: Kind) -> Owner:
    """Whether an object is a child of this run, of an earlier namesake, or of neither."""
    owner = objects.owner(obj, RUN.name) or objects.controller(obj)
    if owner is None:
        # The label alone makes an object ours: a removed owner reference is put back. But a job or
        # pods of an earlier run of the same name belong to another training.
        labelled = objects.labels(obj).get(names.LABEL_RUN) == run.name
        trained = kind in (RAY_JOB, RAY_CLUSTER) and objects.created(obj) < run.created
        return Owner.OURS if labelled and not trained else Owner.FOREIGN
    if owner.get("uid") == run.uid:
        return Owner.OURS
    same = owner.get("kind") == RUN.name and owner.get("name") == run.name
    return Owner.LEFTOVER if same else Owner.FOREIGN


def covers(live: Any, desired: Any) -> bool:
    """Whether ``live`` has every desired field; ``live`` may have more.

    A field that is no longer desired shows only in the hash annotation.
    """
    if isinstance(desired, dict):
        return isinstance(live, dict) and all(
            key in live and _COMPARED.get(key, covers)(live[key], value)
            for key, value in desired.items()
        )
    if isinstance(desired, list):
        return (
            isinstance(live, list)
            and len(live) == len(desired)
            and all(covers(a, b) for a, b in zip(live, desired, strict=True))
        )
    return bool(live == desired)


def _same_amounts(live: Any, desired: Any) -> bool:
    """As `covers`, of a container's requests or limits."""
    if not isinstance(live, dict) or not isinstance(desired, dict):
        return covers(live, desired)
    return all(key in live and same_amount(live[key], value) for key, value in desired.items())


def _has_all(live: Any, desired: Any) -> bool:
    """As `covers`, of a pod's tolerations: Kueue and admission add theirs, and none takes away."""
    if not isinstance(live, list) or not isinstance(desired, list):
        return covers(live, desired)
    return all(any(covers(there, one) for there in live) for one in desired)


_COMPARED: Final[dict[str, Callable[[Any, Any], bool]]] = {
    "requests": _same_amounts,
    "limits": _same_amounts,
    "tolerations": _has_all,
}


def _counts(ray: Object) -> list[list[Any]]:
    keys = ("groupName", "replicas", "minReplicas", "maxReplicas")
    return [[group.get(key) for key in keys] for group in ray["spec"]["workerGroupSpecs"]]


def differs(live: Object, desired: Object) -> bool:
    """Whether ``desired`` has to be applied again."""
    of_ray = desired.get("kind") == RAY_CLUSTER.name
    labelled = QUEUE_LABEL in objects.labels(desired) or QUEUE_LABEL in objects.labels(live)
    if labelled or (of_ray and queue.manages(live)):
        # Kueue writes into templates that it has admitted, and the label where a namespace has a
        # default queue: our hash alone tells of a change.
        if of_ray and not live["spec"].get("suspend"):
            # Kueue suspends a RayCluster whose containers are not those that it has admitted, and
            # pods do not change while they run: the rest is applied when it is suspended.
            return _counts(live) != _counts(desired) or not covers(
                objects.labels(live), objects.labels(desired)
            )
        annotation = names.ANNOTATION_HASH
        before = (objects.metadata(live).get("annotations") or {}).get(annotation)
        return bool(before != objects.metadata(desired)["annotations"][annotation])
    return not covers(live, desired)


def is_calm(live: Object, run: Run, kind: Kind) -> bool:
    """Whether nothing but its fields may be wrong with an object of a child's name."""
    return owner_of(live, run, kind) is Owner.OURS and not objects.being_deleted(live)


async def ensure(
    reads: Reads, kind: Kind, desired: Object, live: Object | None, run: Run, *, changed: bool
) -> Object | None:
    """Create or correct the child; returns the applied object, or None if no change was needed.

    Args:
        changed: whether ``live`` `differs` from ``desired``.

    Raises:
        NameTakenError: the name belongs to an object of another owner.
        LeftoverError: the object of this name is still being deleted.
        ReadLiveError: a change is needed, and ``reads`` is the store.
        ApiError: the API server refused or was not reached.
    """
    if live is not None:
        owner = owner_of(live, run, kind)
        what = f"{kind.name} {objects.name(desired)}"
        if owner is Owner.FOREIGN:
            raise NameTakenError(
                f"{what} exists and does not belong to this run: delete it, or rename the run."
            )
        if kind is CLAIM and owner is Owner.OURS and objects.being_deleted(live):
            raise ClaimTerminatingError(
                f"{what} is being deleted, and stays only while pods use it: no attempt can"
                " start. Copy its checkpoints elsewhere, then delete the run.",
                objects.deletion_time(live),
            )
        if owner is Owner.LEFTOVER or objects.being_deleted(live):
            raise LeftoverError(
                f"{what} of an earlier time is still being deleted.", objects.deletion_time(live)
            )
        if not changed:
            return None
    applied = await reads.apply(kind, desired)
    if live is not None and objects.metadata(live).get("resourceVersion") == objects.metadata(
        applied
    ).get("resourceVersion"):
        return None  # equal values in another notation: the API server stores "1000m" as "1"
    return applied
