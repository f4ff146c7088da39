"""Apply one child, only if it differs from the desired object and belongs to the run."""

from enum import StrEnum
from typing import Any

from trainsync.api import names

from trainsync_operator.kube import objects
from trainsync_operator.kube.client import Api
from trainsync_operator.kube.kinds import RUN, Kind
from trainsync_operator.kube.objects import Object
from trainsync_operator.reconcile.run import QUEUE_LABEL


class NameTakenError(Exception):
    """An object that does not belong to the run has the name of a child."""


class LeftoverError(Exception):
    """A child of an earlier run with the same name is still being deleted; wait."""


class Owner(StrEnum):
    """The owner of an object."""

    OURS = "ours"
    LEFTOVER = "leftover"
    FOREIGN = "foreign"


def owner_of(obj: Object, run_name: str, run_uid: str) -> Owner:
    """Whether an object is a child of this run, of an earlier run with its name, or of neither."""
    controller = objects.controller(obj)
    if controller is None:
        # The label alone makes an object ours: a removed owner reference is put back.
        labelled = objects.labels(obj).get(names.LABEL_RUN) == run_name
        return Owner.OURS if labelled else Owner.FOREIGN
    if controller.get("uid") == run_uid:
        return Owner.OURS
    same = controller.get("kind") == RUN.name and controller.get("name") == run_name
    return Owner.LEFTOVER if same else Owner.FOREIGN


def covers(live: Any, desired: Any) -> bool:
    """Whether ``live`` has every desired field; ``live`` may have more.

    A field that is no longer desired shows only in the hash annotation.
    """
    if isinstance(desired, dict):
        return isinstance(live, dict) and all(
            key in live and covers(live[key], value) for key, value in desired.items()
        )
    if isinstance(desired, list):
        return (
            isinstance(live, list)
            and len(live) == len(desired)
            and all(covers(a, b) for a, b in zip(live, desired, strict=True))
        )
    return bool(live == desired)


def differs(live: Object, desired: Object) -> bool:
    """Whether ``desired`` has to be applied again."""
    if QUEUE_LABEL in objects.labels(desired):
        # Kueue changes the templates of admitted objects, so only the hash shows a change of ours.
        annotation = names.ANNOTATION_HASH
        before = (objects.metadata(live).get("annotations") or {}).get(annotation)
        return bool(before != objects.metadata(desired)["annotations"][annotation])
    return not covers(live, desired)


async def ensure(
    api: Api, kind: Kind, desired: Object, live: Object | None, run_uid: str
) -> Object | None:
    """Create or correct the child; returns the applied object, or None if no change was needed.

    Raises:
        NameTakenError: the name belongs to an object of another owner.
        LeftoverError: a child of an earlier run with the name is still being deleted.
        ApiError: the API server refused or was not reached.
    """
    run_name = objects.labels(desired)[names.LABEL_RUN]
    if live is not None:
        owner = owner_of(live, run_name, run_uid)
        what = f"{kind.name} {objects.name(desired)}"
        if owner is Owner.FOREIGN:
            raise NameTakenError(
                f"{what} exists and does not belong to this run: delete it, or rename the run."
            )
        if owner is Owner.LEFTOVER or objects.being_deleted(live):
            raise LeftoverError(f"{what} of an earlier time is still being deleted.")
        if not differs(live, desired):
            return None
    applied = await api.apply(kind, desired)
    if live is not None and objects.metadata(live).get("resourceVersion") == objects.metadata(
        applied
    ).get("resourceVersion"):
        return None  # equal values in another notation: the API server stores "1000m" as "1"
    return applied
