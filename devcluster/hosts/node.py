"""A node: containerd, kubelet and kube-proxy in namespaces inside those of the control plane."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from devcluster.controlplane.pki import ensure_node_pki
from devcluster.controlplane.servers import kube_proxy_argv
from devcluster.errors import DevclusterError
from devcluster.hosts import cgroups
from devcluster.hosts.init import status_path
from devcluster.hosts.network import connect_node
from devcluster.hosts.processes import (
    component,
    find_init,
    init_argv,
    read_status,
    require_init,
    run_inside,
    start_components,
    write_spec,
)
from devcluster.images.images import PAUSE_IMAGE
from devcluster.paths import Node
from devcluster.shell import wait_until, write_atomically
from devcluster.tools import Tools

RUNTIME = ("containerd",)
AGENTS = ("kubelet", "kube-proxy")
_SOCKET = "/run/containerd/containerd.sock"
CTR = ("ctr", "-a", _SOCKET, "-n", "k8s.io")


def node_component(node: Node) -> dict[str, Any]:
    """The node as a component of the control plane's init."""
    return component(node.name, init_argv(node.spec), node.logs / "init.log")


def prepare_node(node: Node) -> None:
    """Write a node's certificate and configuration, and make its cgroups."""
    ensure_node_pki(node)
    if find_init(node.spec) is None:
        cgroups.remove([node.cgroup])
        status_path(node.spec).unlink(missing_ok=True)
        write_spec(node.spec, node.name, [])
    cgroups.create(node.cgroup)
    for name in ("containerd", "pod-logs", "volume-plugins"):
        (node.directory / name).mkdir(parents=True, exist_ok=True)
    write_atomically(node.directory / "containerd.toml", containerd_config(node))
    write_atomically(node.directory / "kubelet.json", kubelet_config(node))
    write_atomically(node.directory / "cni" / "10-devcluster.conflist", cni_config(node))
    # Pods with the node's DNS (CoreDNS itself) get no server: there is no way to the outside.
    write_atomically(node.directory / "resolv.conf", "# no upstream name server\n")


def start_runtime(node: Node, tools: Tools) -> None:
    """Connect a node whose init runs, and start containerd in the node."""
    logs = [node.logs / "init.log"]
    wait_until(status_path(node.spec).exists, what=node.name, seconds=20, logs=logs)
    pid = require_init(node.spec, node.name)
    if "eth0" not in run_inside(pid, ["ip", "-br", "link"]):
        connect_node(node, require_init(node.cluster.spec, "the control plane"), pid)
    _start(node, tools, RUNTIME)

    def died() -> str | None:
        code = read_status(node.spec).exited.get("containerd")
        return None if code is None else f"it ended with {code}"

    def answers() -> bool:
        try:
            run_inside(pid, [*CTR, "version"], timeout=10)
        except DevclusterError:
            return False
        return True

    logs = [node.logs / "containerd.log"]
    what = f"containerd on {node.name}"
    wait_until(answers, what=what, seconds=20, logs=logs, alive=died)


def start_agents(node: Node, tools: Tools) -> None:
    """Start the kubelet and kube-proxy. The API server should be ready: both retry slowly."""
    start_with(node, tools, [])


def start_with(node: Node, tools: Tools, more: Sequence[dict[str, Any]]) -> None:
    """Start all programs of a node, and ``more`` components beside them."""
    _start(node, tools, [*RUNTIME, *AGENTS], more)


def _start(
    node: Node, tools: Tools, names: Sequence[str], more: Sequence[dict[str, Any]] = ()
) -> None:
    wanted = [one for one in node_components(node, tools) if one["name"] in names]
    wanted += more
    names = [*names, *(one["name"] for one in more)]
    write_spec(node.spec, node.name, wanted)
    start_components(node.spec, names, node.logs)


def node_components(node: Node, tools: Tools) -> list[dict[str, Any]]:
    def build(name: str, argv: Sequence[str | Path]) -> dict[str, Any]:
        return component(name, argv, node.logs / f"{name}.log")

    return [
        build("containerd", ["containerd", "--config", node.directory / "containerd.toml"]),
        build(
            "kubelet",
            [
                tools.path("kubelet"),
                f"--config={node.directory / 'kubelet.json'}",
                f"--kubeconfig={node.directory / 'kubelet.kubeconfig'}",
                f"--root-dir={node.directory / 'kubelet'}",
                f"--hostname-override={node.name}",
                f"--node-ip={node.address}",
            ],
        ),
        build("kube-proxy", kube_proxy_argv(node.cluster, tools, node.name)),
    ]


def containerd_config(node: Node) -> str:
    """Configuration of containerd 1.6 (version 2)."""
    return f"""\
version = 2
root = "{node.directory}/containerd"
state = "/run/containerd"
[grpc]
  address = "{_SOCKET}"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE_IMAGE}"
  # Neither CAP_SYS_RESOURCE nor AppArmor can be relied on.
  restrict_oom_score_adj = true
  disable_apparmor = true
  [plugins."io.containerd.grpc.v1.cri".containerd]
    snapshotter = "overlayfs"
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/usr/lib/cni"
    conf_dir = "{node.directory}/cni"
"""


def kubelet_config(node: Node) -> str:
    pki = node.cluster.pki
    document = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": f"{pki}/ca.crt"},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": f"{pki}/{node.name}.crt",
        "tlsPrivateKeyFile": f"{pki}/{node.name}.key",
        "containerRuntimeEndpoint": f"unix://{_SOCKET}",
        "clusterDNS": [node.cluster.dns_service],
        "clusterDomain": "cluster.local",
        "resolvConf": str(node.directory / "resolv.conf"),
        "podLogsDir": str(node.directory / "pod-logs"),
        "volumePluginDir": str(node.directory / "volume-plugins"),
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{node.cgroup}",
        "oomScoreAdj": 0,
        "failSwapOn": False,
        "serializeImagePulls": False,
        # A lost node is detected in seconds; see the controller manager's flags.
        "nodeStatusUpdateFrequency": "2s",
        "nodeLeaseDurationSeconds": 8,
        # Other programs share the machine's disk: do not evict early. Never delete images: there is
        # no registry from which to pull them again.
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%"},
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
    }
    return json.dumps(document, indent=2) + "\n"


def cni_config(node: Node) -> str:
    document = {
        "cniVersion": "0.4.0",
        "name": "devcluster",
        "plugins": [
            {
                "type": "ptp",
                "ipMasq": False,
                "ipam": {
                    "type": "host-local",
                    "ranges": [[{"subnet": node.pod_cidr}]],
                    "routes": [{"dst": "0.0.0.0/0"}],
                    "dataDir": "/run/devcluster/addresses",
                },
            }
        ],
    }
    return json.dumps(document, indent=2) + "\n"
