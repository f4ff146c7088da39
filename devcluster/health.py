"""The state of a cluster's parts, from its inits and from the API server."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from devcluster.addons import DEPLOYMENTS, unavailable_addons
from devcluster.controlplane.kubeapi import ApiError, KubeApi
from devcluster.controlplane.servers import SERVERS, STORE
from devcluster.hosts.network import host_link_up
from devcluster.hosts.node import AGENTS, RUNTIME
from devcluster.hosts.policy_controller import CONTROLLER
from devcluster.hosts.processes import find_init, read_status
from devcluster.paths import Node
from devcluster.registry import Record

GOOD = {"running", "ready", "Ready", "Available", "up"}
_EFFECTS = {"unknown", "not ready"}


@dataclass(frozen=True)
class Health:
    """The state of each part, in readable words."""

    control_plane: dict[str, str]
    nodes: dict[str, str]
    addons: dict[str, str]

    @property
    def alive(self) -> bool:
        """Whether the cluster can be repaired: without its namespaces a cluster is gone."""
        return bool(self.control_plane)

    @property
    def faults(self) -> list[str]:
        """Faults, such as ``etcd is dead``; a fault hides the faults that follow from it."""
        if not self.alive:
            return ["its namespaces are gone"]
        parts = {**self.control_plane, **self.nodes, **self.addons}
        bad = {name: state for name, state in parts.items() if state not in GOOD}
        causes = {name: state for name, state in bad.items() if state not in _EFFECTS}
        return [f"{name} is {state}" for name, state in (causes or bad).items()]


def examine(record: Record) -> Health:
    """Check every part once; takes a fraction of a second."""
    cluster = record.cluster
    if find_init(cluster.spec) is None:
        return Health({}, {}, {})
    running = read_status(cluster.spec).running
    control_plane = {name: "running" if name in running else "dead" for name in (*STORE, *SERVERS)}
    control_plane["network link"] = "up" if host_link_up(cluster) else "gone"
    api = KubeApi(cluster)
    api_ready = api.ready()
    control_plane["API server"] = "ready" if api_ready else "not ready"
    members = [cluster.node(number) for number in range(1, record.nodes + 1)]
    programs = {*RUNTIME, *AGENTS, *([CONTROLLER] if record.policies else [])}
    ready = ready_nodes(api) if api_ready else None
    missing = unavailable_addons(api) if api_ready else None
    return Health(
        control_plane,
        {node.name: _node_state(node, programs, ready) for node in members},
        {
            name: "unknown"
            if missing is None
            else "unavailable"
            if name in missing
            else "Available"
            for _, name in DEPLOYMENTS
        },
    )


def ready_nodes(api: KubeApi) -> set[str]:
    """Names of the Ready Nodes; empty if the API server does not answer."""
    try:
        items = api.get("/api/v1/nodes")["items"]
    except ApiError as error:
        if error.status == 0:
            return set()
        raise
    return {
        item["metadata"]["name"]
        for item in items
        for condition in item.get("status", {}).get("conditions", [])
        if condition["type"] == "Ready" and condition["status"] == "True"
    }


def heard_from(api: KubeApi, since: datetime) -> set[str]:
    """Names of the Nodes whose kubelet renewed its Lease after ``since``.

    A Node stays Ready for seconds after its kubelet is gone; the Lease shows whether the kubelet
    runs.
    """
    try:
        leases = api.get("/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases")["items"]
    except ApiError as error:
        if error.status == 0:
            return set()
        raise
    return {
        lease["metadata"]["name"]
        for lease in leases
        if datetime.fromisoformat(lease["spec"]["renewTime"]) > since
    }


def _node_state(node: Node, programs: set[str], ready: set[str] | None) -> str:
    if find_init(node.spec) is None:
        return "not running"
    dead = programs - read_status(node.spec).running
    if dead:
        return f"without {' and '.join(sorted(dead))}"
    if ready is None:
        return "unknown"
    return "Ready" if node.name in ready else "NotReady"
