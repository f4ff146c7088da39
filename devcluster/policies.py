"""A policy controller on every node, to test what NetworkPolicies allow.

Not part of a cluster, whose CNI enforces none: `python3 -m devcluster policies` adds it to a
running cluster. `up` and `node-start` then keep it; a cluster made anew has none.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from devcluster.controlplane.pki import Identity, ensure_client
from devcluster.errors import DevclusterError
from devcluster.hosts.policy_controller import CONTROLLER, start_controller
from devcluster.hosts.processes import find_init
from devcluster.lifecycle import require_record
from devcluster.packages import POLICY_PACKAGES, ensure_packages
from devcluster.registry import cluster_lock, write_record
from devcluster.shell import Progress, run
from devcluster.tools import ensure_policy_tools, ensure_tools

_USER = f"devcluster:{CONTROLLER}"


def start_policies(name: str, progress: Progress) -> None:
    """Start the controller on every node that runs, and wait until all enforce; repeatable.

    Raises DevclusterError.
    """
    ensure_packages(progress, POLICY_PACKAGES)
    policies = ensure_policy_tools(progress)
    tools = ensure_tools(progress)
    with cluster_lock(name, progress):
        record = require_record(name)
        cluster = record.cluster
        nodes = [cluster.node(number) for number in range(1, record.nodes + 1)]
        alive = [node for node in nodes if find_init(node.spec) is not None]
        if not alive:
            raise DevclusterError(f"no node of cluster {name!r} is running: run `up` first")
        ensure_client(cluster, Identity(CONTROLLER, _USER), cluster.policy_kubeconfig)
        kubectl = [str(tools.path("kubectl")), f"--kubeconfig={cluster.kubeconfig}"]
        run([*kubectl, "apply", "--server-side", "--force-conflicts", "-f", "-"], stdin=_rights())
        write_record(replace(record, policies=True))
        for node in alive:
            start_controller(node, tools, policies)
    names = ", ".join(node.name for node in alive)
    progress.say(f"NetworkPolicies are enforced on {names}")


def _rights() -> str:
    """What the controller reads, as a list for kubectl."""
    group = "rbac.authorization.k8s.io"
    meta: dict[str, Any] = {"apiVersion": f"{group}/v1", "metadata": {"name": _USER}}
    watched = {
        "": ["namespaces", "pods", "nodes", "services", "endpoints"],
        "discovery.k8s.io": ["endpointslices"],
        "networking.k8s.io": ["networkpolicies"],
    }
    rules = [
        {"apiGroups": [api], "resources": kinds, "verbs": ["get", "list", "watch"]}
        for api, kinds in watched.items()
    ]
    role = {**meta, "kind": "ClusterRole", "rules": rules}
    binding = {
        **meta,
        "kind": "ClusterRoleBinding",
        "roleRef": {"apiGroup": group, "kind": "ClusterRole", "name": _USER},
        "subjects": [{"apiGroup": group, "kind": "User", "name": _USER}],
    }
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": [role, binding]})
