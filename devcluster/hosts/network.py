"""Links, addresses and routes between the machine, the control plane and the nodes.

The control plane's namespace has a bridge; the machine and every node are connected to the bridge
by a veth pair. All links disappear with the namespaces, but the machine's end of its pair may stay
for up to two minutes: ``up`` and ``down`` delete this end.
"""

from __future__ import annotations

import ipaddress
import json
import time
from collections.abc import Sequence

from devcluster.errors import DevclusterError
from devcluster.hosts.processes import run_in_network
from devcluster.paths import MAX_NODES, Cluster, Node
from devcluster.shell import run

_BRIDGE = "cluster"


def connect_control_plane(cluster: Cluster, pid: int) -> None:
    """Make the bridge in the control plane (init ``pid``) and connect this machine to the
    bridge."""
    remove_host_link(cluster)
    # A fixed MAC: otherwise the bridge's MAC changes when a node dies, and the other nodes lose the
    # API server until their neighbour entries expire (8 s).
    mac = f"02:54:53:{cluster.index:02x}:00:02"
    _ip(
        pid,
        [
            f"link add {_BRIDGE} address {mac} type bridge",
            f"address add {cluster.address}/24 dev {_BRIDGE}",
            f"link set {_BRIDGE} up",
            # Connections to Services are routed here before kube-proxy's rules redirect them.
            f"route add {cluster.service_cidr} dev {_BRIDGE}",
            *_pod_routes(cluster),
        ],
    )
    run(
        ["ip", "link", "add", cluster.host_link, "type", "veth", "peer", "name", "port-host",
         "netns", str(pid)]
    )  # fmt: skip
    _ip(pid, [f"link set port-host master {_BRIDGE}", "link set port-host up"])
    run(["ip", "address", "add", f"{cluster.host_address}/24", "dev", cluster.host_link])
    run(["ip", "link", "set", cluster.host_link, "up"])
    _ip(
        None,
        [
            f"route replace {cluster.service_cidr} via {cluster.address}",
            *_pod_routes(cluster),
        ],
    )


def host_link_up(cluster: Cluster) -> bool:
    """Whether this machine is connected to the cluster."""
    return any(
        link["ifname"] == cluster.host_link for link in json.loads(run(["ip", "-j", "link"]))
    )


def connect_node(node: Node, control_plane_pid: int, node_pid: int) -> None:
    """Connect a node (init ``node_pid``) to the bridge."""
    cluster = node.cluster
    links = json.loads(run_in_network(control_plane_pid, ["ip", "-j", "link"]))
    if any(link["ifname"] == node.link for link in links):
        _ip(control_plane_pid, [f"link delete {node.link}"])
    run_in_network(
        control_plane_pid,
        ["ip", "link", "add", node.link, "type", "veth", "peer", "name", "eth0",
         "netns", str(node_pid)],
    )  # fmt: skip
    _ip(control_plane_pid, [f"link set {node.link} master {_BRIDGE}", f"link set {node.link} up"])
    _ip(
        node_pid,
        [
            f"address add {node.address}/24 dev eth0",
            "link set eth0 up",
            f"route add {cluster.service_cidr} via {cluster.address}",
            # No default route: connections to the outside fail at once instead of after a timeout.
            *_pod_routes(cluster, besides=node),
        ],
    )


def cut(node: Node, control_plane_pid: int, seconds: float) -> None:
    """Take a node's cable out of the bridge for so long."""
    _ip(control_plane_pid, [f"link set {node.link} down"])
    try:
        time.sleep(seconds)
    finally:
        _ip(control_plane_pid, [f"link set {node.link} up"])


def remove_host_link(cluster: Cluster) -> None:
    """Delete this machine's end of the veth pair, and so the routes over it."""
    if host_link_up(cluster):
        run(["ip", "link", "delete", cluster.host_link])


def host_networks() -> list[ipaddress.IPv4Network]:
    """The networks of this machine's routes, without the default route."""
    routes = json.loads(run(["ip", "-4", "-j", "route"]))
    return [ipaddress.IPv4Network(route["dst"]) for route in routes if route["dst"] != "default"]


def require_free_ranges(cluster: Cluster, networks: Sequence[ipaddress.IPv4Network]) -> None:
    for network in networks:
        if cluster.overlaps(network):
            raise DevclusterError(
                f"this machine has a route to {network}, which cluster {cluster.name!r} needs"
            )


def _pod_routes(cluster: Cluster, besides: Node | None = None) -> list[str]:
    # For every possible node: a route to an absent node is harmless.
    nodes = [cluster.node(number) for number in range(1, MAX_NODES + 1)]
    return [
        f"route replace {node.pod_cidr} via {node.address}" for node in nodes if node != besides
    ]


def _ip(pid: int | None, commands: Sequence[str]) -> None:
    argv = ["ip", "-batch", "-"]
    script = "\n".join(commands) + "\n"
    if pid is None:
        run(argv, stdin=script, timeout=20)
    else:
        run_in_network(pid, argv, stdin=script)
