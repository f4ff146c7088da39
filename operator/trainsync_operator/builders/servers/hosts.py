"""The pods of one server of several nodes: what LeaderWorkerSets call them, and who leads."""

from enum import StrEnum
from typing import Any, Final

from trainsync.api import env, names
from trainsync.api.servers import Server

from trainsync_operator.builders.target import Target

# On every pod of a LeaderWorkerSet: its node-rank in the server, and the server's number.
LABEL_RANK: Final = "leaderworkerset.sigs.k8s.io/worker-index"
LABEL_GROUP: Final = "leaderworkerset.sigs.k8s.io/group-index"
LEADING: Final = "0"
# Probes of the user's server, which a node without an endpoint does not answer.
_PROBES: Final = ("livenessProbe", "readinessProbe", "startupProbe")


class PodRole(StrEnum):
    """Of a server's pods: the only one, the first of several, which answers, or another."""

    WHOLE = "whole"
    LEADER = "leader"
    WORKER = "worker"


def answering(labels: dict[str, str], server: Server) -> dict[str, str]:
    """The selector of the pods that answer requests."""
    return labels if server.nodes == 1 else {**labels, LABEL_RANK: LEADING}


def agents(target: Target, server: Server, role: PodRole) -> dict[str, str]:
    """Variables with which the agents of one server find one another.

    The name of a leader's pod is that of its Service, too; both are in the pod's environment.
    """
    if role is PodRole.LEADER:
        leader, namespace = f"$({env.POD_NAME})", target.run.namespace
        others = (f"{leader}-{rank}.{leader}.{namespace}" for rank in range(1, server.nodes))
        urls = (f"http://{host}.svc:{names.AGENT_PORT}" for host in others)
        return {env.AGENT_OTHER_HOSTS: ",".join(urls)}
    if role is PodRole.WORKER:
        return {env.AGENT_LEADER: f"http://$(LWS_LEADER_ADDRESS).svc:{names.AGENT_PORT}"}
    return {}


def complete(container: dict[str, Any], server: Server, role: PodRole) -> None:
    """Tell the user's container of the server which node of the server it is.

    Raises:
        ValueError: the container has no command to which arguments could be appended.
    """
    if role is PodRole.WHOLE:
        return
    if not container.get("command") and not container.get("args"):
        raise ValueError(
            "the first container has neither command nor args, and arguments cannot be appended to"
            " those of an image"
        )
    rank, leader = "$(LWS_WORKER_INDEX)", "$(LWS_LEADER_ADDRESS).svc"
    arguments = ["--nnodes", str(server.nodes), "--node-rank", rank, "--master-addr", leader]
    if role is PodRole.WORKER:
        arguments.append("--headless")
        for probe in _PROBES:
            container.pop(probe, None)
    container["args"] = [*(container.get("args") or []), *arguments]
