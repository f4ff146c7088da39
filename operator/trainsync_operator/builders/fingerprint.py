"""Which spec a RayCluster or a RayJob was made from, as an annotation on it.

Pods and jobs that run do not change with an edit, so that an edit begins a new attempt. The
fingerprint is of what the user wrote and not of what is built: another release of the operator
builds other pods, and must not end the attempts of all runs.
"""

import hashlib
import json
from typing import Any, Final

from trainsync.api.base import Model
from trainsync.api.spec import Cluster, TrainingRunSpec

# Of another format nothing can be told.
_FORMAT: Final = "v1"


def _digest(model: Model, **selection: Any) -> str:
    # Without defaults: a field that a newer CRD fills in is no edit.
    written = model.model_dump(mode="json", by_alias=True, exclude_defaults=True, **selection)
    text = json.dumps(written, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _text(parts: dict[str, str]) -> str:
    return json.dumps({"format": _FORMAT, **parts}, sort_keys=True)


def of_pods(spec: TrainingRunSpec, cluster: Cluster) -> str:
    """The fingerprint of everything that the pods of a cluster are made from.

    How many explorers there are may change at any time, and what the monitor alone decides
    (``maxToKeep``, ``saveTimeoutSeconds``, ``verify``) holds at once.
    """
    apart: Any = {"name": True, "entrypoint": True, "runtime_env_yaml": True}
    counts = ("replicas", "min_replicas", "max_replicas")
    apart["groups"] = {"__all__": dict.fromkeys(counts, True)}
    saves: Any = dict.fromkeys(("interval", "memory", "save_strategy"), True)
    if spec.checkpoint.storage.incremental:  # else the storage is left out, as older releases do
        saves["storage"] = {"incremental"}
    parts = {
        f"spec.clusters[{cluster.name}]": _digest(cluster, exclude=apart),
        "spec.sync": _digest(spec.sync),
        "spec.checkpoint": _digest(spec.checkpoint, include=saves),
    }
    if (store := spec.checkpoint.storage.object_store) is not None:
        parts["spec.checkpoint.storage.objectStore"] = _digest(store)
    return _text(parts)


def of_job(cluster: Cluster) -> str:
    """The fingerprint of everything that a cluster's job is made from."""
    name = f"spec.clusters[{cluster.name}]"
    return _text(
        {
            f"{name}.entrypoint": _digest(cluster, include={"entrypoint"}),
            f"{name}.runtimeEnvYAML": _digest(cluster, include={"runtime_env_yaml"}),
        }
    )


def edited(made_from: str | None, wanted: str) -> list[str]:
    """The fields that differ; none where the fingerprint says nothing, as of another release."""
    try:
        before, after = json.loads(made_from or "{}"), json.loads(wanted)
    except ValueError:
        return []
    if not isinstance(before, dict) or before.get("format") != after["format"]:
        return []
    return [name for name, digest in after.items() if before.get(name, digest) != digest]
