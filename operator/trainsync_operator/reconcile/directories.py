"""The directories and prefixes that runs save into, each of which is one run's at a time; pure."""

from collections.abc import Iterable
from typing import Any, Final

from trainsync.api import names
from trainsync.api.status import ConditionType

from trainsync_operator.kube import objects
from trainsync_operator.kube.kinds import RUN, Kind
from trainsync_operator.kube.objects import Object
from trainsync_operator.reconcile.run import Problem

_TAKEN: Final = "DirectoryTaken"


def keys(run: Object) -> dict[str, str]:
    """Where a TrainingRun writes: a key that equals another run's for the same place, and words.

    The CRD's rules leave one spelling of a path. Of what they do not admit nothing is said.
    """
    meta, spec = objects.metadata(run), run.get("spec") or {}
    checkpoint: dict[str, Any] = spec.get("checkpoint") or {}
    storage: dict[str, Any] = checkpoint.get("storage") or {}
    claim = (storage.get("persistentVolumeClaim") or {}).get("claimName")
    if claim is None and "volumeClaimTemplate" in storage:
        claim = names.claim_name(meta["name"])
    found = {}
    if claim is not None:
        path = checkpoint.get("path") or meta["name"]
        where = f"claim {meta['namespace']}/{claim}/{path}"
        found[where] = f"the directory {path} of the claim {claim}"
    sync: dict[str, Any] = spec.get("sync") or {}
    for store in (storage.get("objectStore"), checkpoint.get("mirror"), sync.get("store")):
        if store and "url" in store:
            url = str(store["url"]).rstrip("/")
            found[f"bucket {store.get('endpoint') or ''} {url}"] = url
    return found


def index(kind: Kind, obj: Object) -> Iterable[str]:
    """The keys of a run, for the store of what the watches have seen."""
    return keys(obj) if kind is RUN else ()


def _has_begun(run: Object) -> bool:
    return "attempt" in objects.status(run)


def _writes(run: Object) -> bool:
    """Whether a run writes, or is to write: one that is being deleted has pods for a while."""
    ended = (ConditionType.COMPLETE, ConditionType.FAILED)
    ours = (run.get("spec") or {}).get("managedBy") in (None, names.MANAGER)
    return ours and not any(objects.condition_is_true(run, kind) for kind in ended)


def _precedes(other: Object, run: Object) -> bool:
    """Whether ``other`` comes before a ``run`` that has not begun."""

    def age(obj: Object) -> tuple[Any, str]:
        return objects.created(obj), objects.metadata(obj)["uid"]

    return _has_begun(other) or age(other) < age(run)


def taken(run: Object, others: Iterable[Object]) -> Problem | None:
    """Why a run that has not begun may not begin: another one has a place that it would write to.

    Args:
        others: runs, among which may be some with other places, and ``run`` itself.
    """
    mine, meta = keys(run), objects.metadata(run)
    for other in others:
        theirs = objects.metadata(other)
        if theirs["uid"] == meta["uid"] or not _writes(other) or not _precedes(other, run):
            continue
        shared = mine.keys() & keys(other).keys()
        if not shared:
            continue
        near = theirs["namespace"] == meta["namespace"]
        name = f"TrainingRun {theirs['name']}" if near else "A TrainingRun of another namespace"
        return Problem(
            _TAKEN,
            f"{name} saves into {mine[min(shared)]}, and two runs would overwrite each other's"
            " checkpoints: give this run a place of its own, or wait: it begins when the other has"
            " ended or is deleted.",
        )
    return None
