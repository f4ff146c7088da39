"""The control plane: etcd, the three Kubernetes servers, a kube-proxy and the volume reclaimer."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from devcluster.controlplane.audit import audit_flags, write_audit_policy
from devcluster.controlplane.kubeapi import KubeApi
from devcluster.hosts.network import connect_control_plane, host_link_up
from devcluster.hosts.processes import (
    component,
    find_init,
    read_status,
    require_init,
    start_components,
    start_init,
    write_spec,
)
from devcluster.paths import API_PORT, Cluster
from devcluster.shell import wait_until
from devcluster.tools import Tools

STORE = ("etcd", "kube-apiserver")
SERVERS = ("kube-controller-manager", "kube-scheduler", "kube-proxy", "volume-reclaimer")


def start_namespaces(cluster: Cluster) -> None:
    """Ensure that the control plane's namespaces exist and are connected to this machine."""
    pid = find_init(cluster.spec)
    if pid is not None and host_link_up(cluster):
        return
    if pid is None:
        write_spec(cluster.spec, f"{cluster.name}-control-plane", [])
        start_init(cluster.spec, cluster.logs / "init.log")
        pid = require_init(cluster.spec, "the control plane")
    connect_control_plane(cluster, pid)


def start_members(
    cluster: Cluster, tools: Tools, members: Sequence[str], nodes: Sequence[dict[str, Any]]
) -> None:
    """Start the ``members`` (and nodes' inits) that do not run."""
    every = control_plane_components(cluster, tools)
    wanted = [*(one for one in every if one["name"] in members), *nodes]
    write_audit_policy(cluster)
    write_spec(cluster.spec, f"{cluster.name}-control-plane", wanted)
    start_components(cluster.spec, [one["name"] for one in wanted], cluster.logs)


def wait_for_api(cluster: Cluster) -> None:
    """Wait until the API server is ready. Raises DevclusterError, at once if it or etcd died."""
    logs = [cluster.logs / f"{name}.log" for name in STORE]

    def died() -> str | None:
        exited = read_status(cluster.spec).exited
        return next((f"{name} ended with {exited[name]}" for name in STORE if name in exited), None)

    wait_until(KubeApi(cluster).ready, what="the API server", seconds=60, logs=logs, alive=died)


def control_plane_components(cluster: Cluster, tools: Tools) -> list[dict[str, Any]]:
    """All programs of the control plane's init, ``STORE`` first."""

    def build(name: str, argv: Sequence[str | Path]) -> dict[str, Any]:
        return component(name, argv, cluster.logs / f"{name}.log")

    reclaimer = ["env", f"PYTHONPATH={Path(__file__).parents[2]}", "PYTHONDONTWRITEBYTECODE=1"]
    reclaimer += [
        sys.executable,
        "-m",
        "devcluster.controlplane.reclaimer",
        cluster.name,
        str(cluster.index),
    ]
    return [
        build("etcd", _etcd(cluster, tools)),
        build("kube-apiserver", _apiserver(cluster, tools)),
        build("kube-controller-manager", _controller_manager(cluster, tools)),
        build("kube-scheduler", _scheduler(cluster, tools)),
        build("kube-proxy", kube_proxy_argv(cluster, tools, "node-1")),
        build("volume-reclaimer", reclaimer),
    ]


def _etcd(cluster: Cluster, tools: Tools) -> list[str | Path]:
    peer = "http://127.0.0.1:2380"
    return [
        tools.path("etcd"),
        f"--data-dir={cluster.etcd_data}",
        "--listen-client-urls=http://127.0.0.1:2379",
        "--advertise-client-urls=http://127.0.0.1:2379",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
        # A disposable cluster need not survive a power cut.
        "--unsafe-no-fsync",
        "--log-level=warn",
    ]


def _apiserver(cluster: Cluster, tools: Tools) -> list[str | Path]:
    pki = cluster.pki
    return [
        tools.path("kube-apiserver"),
        f"--advertise-address={cluster.address}",
        f"--secure-port={API_PORT}",
        "--etcd-servers=http://127.0.0.1:2379",
        "--authorization-mode=Node,RBAC",
        "--enable-admission-plugins=NodeRestriction",
        "--allow-privileged=true",
        f"--client-ca-file={pki}/ca.crt",
        f"--tls-cert-file={pki}/apiserver.crt",
        f"--tls-private-key-file={pki}/apiserver.key",
        f"--kubelet-certificate-authority={pki}/ca.crt",
        f"--kubelet-client-certificate={pki}/apiserver-kubelet-client.crt",
        f"--kubelet-client-key={pki}/apiserver-kubelet-client.key",
        "--kubelet-preferred-address-types=InternalIP",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={pki}/service-accounts.pub",
        f"--service-account-signing-key-file={pki}/service-accounts.key",
        f"--service-cluster-ip-range={cluster.service_cidr}",
        f"--requestheader-client-ca-file={pki}/front-proxy-ca.crt",
        "--requestheader-allowed-names=front-proxy-client",
        "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        "--requestheader-group-headers=X-Remote-Group",
        "--requestheader-username-headers=X-Remote-User",
        f"--proxy-client-cert-file={pki}/front-proxy-client.crt",
        f"--proxy-client-key-file={pki}/front-proxy-client.key",
        "--enable-aggregator-routing=true",
        # A test that kills a node should wait seconds for the detection, not minutes.
        "--default-not-ready-toleration-seconds=5",
        "--default-unreachable-toleration-seconds=5",
        "--profiling=false",
        *audit_flags(cluster),
    ]


def _controller_manager(cluster: Cluster, tools: Tools) -> list[str | Path]:
    pki = cluster.pki
    kubeconfig = pki / "controller-manager.kubeconfig"
    return [
        tools.path("kube-controller-manager"),
        f"--kubeconfig={kubeconfig}",
        f"--authentication-kubeconfig={kubeconfig}",
        f"--authorization-kubeconfig={kubeconfig}",
        f"--root-ca-file={pki}/ca.crt",
        f"--service-account-private-key-file={pki}/service-accounts.key",
        f"--cluster-signing-cert-file={pki}/ca.crt",
        f"--cluster-signing-key-file={pki}/ca.key",
        "--use-service-account-credentials=true",
        "--allocate-node-cidrs=false",
        "--leader-elect=false",
        # With the kubelet's status every 2 s: a dead node is NotReady after 8 s.
        "--node-monitor-period=1s",
        "--node-monitor-grace-period=8s",
        "--bind-address=127.0.0.1",
        "--profiling=false",
    ]


def _scheduler(cluster: Cluster, tools: Tools) -> list[str | Path]:
    kubeconfig = cluster.pki / "scheduler.kubeconfig"
    return [
        tools.path("kube-scheduler"),
        f"--kubeconfig={kubeconfig}",
        f"--authentication-kubeconfig={kubeconfig}",
        f"--authorization-kubeconfig={kubeconfig}",
        "--leader-elect=false",
        "--bind-address=127.0.0.1",
        "--profiling=false",
    ]


def kube_proxy_argv(cluster: Cluster, tools: Tools, node: str) -> list[str | Path]:
    """kube-proxy for a node, or for the control plane.

    The control plane is no Node, but kube-proxy waits 30 s for a Node with its name before it
    writes rules. In the control plane kube-proxy uses the first node's name, which affects only
    NodePorts.
    """
    return [
        tools.path("kube-proxy"),
        f"--kubeconfig={cluster.pki / 'kube-proxy.kubeconfig'}",
        f"--hostname-override={node}",
        "--proxy-mode=iptables",
        f"--cluster-cidr={cluster.pod_cidr}",
        "--conntrack-max-per-core=0",
        "--iptables-min-sync-period=200ms",
    ]
