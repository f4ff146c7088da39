"""Whether a decision still holds for a run that was written meanwhile; pure."""

from typing import Any

from trainsync_operator.kube import objects
from trainsync_operator.kube.objects import Object
from trainsync_operator.reconcile import status
from trainsync_operator.reconcile.run import Run


def same(live: Object, read: Object) -> bool:
    """Whether a decision made on ``read`` holds for ``live``: all that differs is the monitor's."""

    def ours(raw: Object) -> tuple[Any, ...]:
        meta = objects.metadata(raw)
        return (
            meta.get("uid"),
            meta.get("generation", 0),
            meta.get("deletionTimestamp"),
            meta.get("labels") or {},
            status.owned(objects.status(raw)),
        )

    return ours(live) == ours(read)


def as_read(run: Run) -> Object:
    """The run as an object with the fields that `same` compares and a write of its status needs."""
    meta = {
        "name": run.name,
        "namespace": run.namespace,
        "uid": run.uid,
        "generation": run.generation,
        "labels": run.labels,
        "resourceVersion": run.resource_version,
    }
    return {"metadata": meta, "status": run.status}


def of_monitor(of_run: dict[str, Any]) -> dict[str, Any]:
    """The monitor's part of a status on which decisions are made."""
    return {key: of_run.get(key) for key in ("progress", "checkpoint")}
