"""The LeaderWorkerSet of one entry of spec.servers whose servers have several nodes.

Its own surge goes before the last server is replaced, so that one fewer than asked for would be
ready: while servers are replaced, one more is asked for instead, and at most one is missing.
"""

import hashlib
import json
from typing import Any, Final

from trainsync.api import names
from trainsync.api.servers import Server

from trainsync_operator.builders.servers import pod
from trainsync_operator.builders.servers.deployment import keep_scaled
from trainsync_operator.builders.servers.hosts import PodRole
from trainsync_operator.builders.target import Target, child
from trainsync_operator.kube import objects
from trainsync_operator.kube.kinds import LEADER_WORKER_SET
from trainsync_operator.kube.objects import Object

_ONE_BY_ONE: Final = {
    "type": "RollingUpdate",
    "rollingUpdateConfiguration": {"partition": 0, "maxUnavailable": 1, "maxSurge": 0},
}


def build(
    target: Target,
    server: Server,
    live: Object | None = None,
    *,
    serves: bool = True,
    renewed: int = 0,
) -> dict[str, Any]:
    """The LeaderWorkerSet; ``live`` is that which exists.

    Args:
        serves: whether it has any pods now.
        renewed: servers that are ready, and of the template of ``live``.

    Raises:
        SpecError: no pod can be built from the template.
    """
    labels = pod.labels(target.run.name, server)
    template: dict[str, Any] = {
        "size": server.nodes,
        # Another one would count the restarts of agents, too: the operator counts those of engines.
        "restartPolicy": "None",
        "leaderTemplate": pod.template(target, server, PodRole.LEADER),
        "workerTemplate": pod.template(target, server, PodRole.WORKER),
    }
    mark = hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:16]
    for part in ("leaderTemplate", "workerTemplate"):
        template[part]["metadata"]["labels"][names.LABEL_TEMPLATE] = mark
    spec: dict[str, Any] = {
        # Workers begin with their leader, which waits for them.
        "startupPolicy": "LeaderCreated",
        "rolloutStrategy": _ONE_BY_ONE,
        # A Service for each leader: one for all would have the name of the servers' own.
        "networkConfig": {"subdomainPolicy": "UniquePerReplica"},
        "leaderWorkerTemplate": template,
    }
    if not serves:
        spec["replicas"] = 0
    elif server.replicas is not None:
        spec["replicas"] = server.replicas
    name = names.server_name(target.run.name, server.name)
    made = child(target, LEADER_WORKER_SET, name, pod.COMPONENT, {"spec": spec}, labels)
    keep_scaled(made, server, live, asked(live or {}), serves=serves)
    if serves and live is not None and _is_replacing(live, made, mark, renewed):
        wanted = made["spec"].get("replicas", 1)
        annotations = made["metadata"]["annotations"]
        annotations[names.ANNOTATION_SURGE_OF] = str(wanted)
        # The hash tells what is asked for, and the end of this changes nothing else.
        annotations[names.ANNOTATION_HASH] += f"-{wanted}"
        made["spec"]["replicas"] = wanted + 1
    return made


def _is_replacing(live: Object, made: Object, mark: str, renewed: int) -> bool:
    """Whether servers are to be replaced, or are not all replaced yet."""
    wanted = made["spec"].get("replicas", 1)
    if wanted == 0 or asked(live) == 0:
        return False
    if template_of(live) != mark:
        return True
    return names.ANNOTATION_SURGE_OF in objects.annotations(live) and renewed <= wanted


def asked(live: Object) -> int:
    """How many servers are asked for, without one more while they are replaced."""
    replicas = int((live.get("spec") or {}).get("replicas", 1))
    surge_of = objects.annotations(live).get(names.ANNOTATION_SURGE_OF, "")
    return replicas - 1 if surge_of == str(replicas - 1) else replicas


def template_of(live: Object) -> str | None:
    """The hash of the templates that a LeaderWorkerSet makes pods from now."""
    template = (live.get("spec") or {}).get("leaderWorkerTemplate") or {}
    return objects.labels(template.get("leaderTemplate") or {}).get(names.LABEL_TEMPLATE)
