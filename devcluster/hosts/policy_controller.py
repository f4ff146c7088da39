"""kube-router on a node, as a firewall alone: the CNI routes, and kube-proxy has the Services."""

from __future__ import annotations

from typing import Any

from devcluster.hosts.node import start_with
from devcluster.hosts.processes import component, read_status, require_init, run_inside
from devcluster.paths import Node
from devcluster.shell import wait_until
from devcluster.tools import Tools

CONTROLLER = "kube-router"
_SECONDS = 60
# The last rule of a complete pass: before the first pass every connection is open.
_SYNCED = "--mark 0x20000"


def start_controller(node: Node, tools: Tools, policies: Tools) -> None:
    """Start the controller on a node, and wait until it enforces.

    The Node must exist, else the controller ends. Raises DevclusterError.
    """
    start_with(node, tools, [_component(node, policies)])
    pid = require_init(node.spec, node.name)

    def died() -> str | None:
        code = read_status(node.spec).exited.get(CONTROLLER)
        return None if code is None else f"it ended with {code}"

    wait_until(
        lambda: _SYNCED in run_inside(pid, ["iptables-save", "-t", "filter"]),
        what=f"{CONTROLLER} on {node.name}",
        seconds=_SECONDS,
        logs=[node.logs / f"{CONTROLLER}.log"],
        alive=died,
    )


def _component(node: Node, policies: Tools) -> dict[str, Any]:
    cluster = node.cluster
    return component(
        CONTROLLER,
        [
            policies.path(CONTROLLER),
            f"--kubeconfig={cluster.policy_kubeconfig}",
            f"--hostname-override={node.name}",
            "--run-firewall=true",
            "--run-router=false",
            "--run-service-proxy=false",
            f"--service-cluster-ip-range={cluster.service_cidr}",
        ],
        node.logs / f"{CONTROLLER}.log",
    )
