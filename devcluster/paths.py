"""Names, addresses and paths of one cluster: pure, no I/O.

Clusters on one machine share no resource: each has its own index ``I``, which determines its
address ranges, the name of the host's network link and its cgroups.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path

STATE_ROOT = Path("/var/lib/trainsync/devcluster")

MAX_NODES = 8
"""Node N has the address 10.222.I.1N."""

MAX_CLUSTERS = 32
"""10.(96+I) must stay below 10.128, where the pods' ranges begin."""

API_PORT = 6443


@dataclass(frozen=True)
class Node:
    """One node of a cluster."""

    cluster: Cluster
    number: int

    @property
    def name(self) -> str:
        return f"node-{self.number}"

    @property
    def address(self) -> str:
        return f"10.222.{self.cluster.index}.1{self.number}"

    @property
    def pod_cidr(self) -> str:
        return f"10.{128 + self.cluster.index}.{self.number}.0/24"

    @property
    def directory(self) -> Path:
        return self.cluster.directory / self.name

    @property
    def spec(self) -> Path:
        """What the node's init runs; its path also identifies the init in /proc."""
        return self.directory / "init.json"

    @property
    def logs(self) -> Path:
        return self.cluster.logs / self.name

    @property
    def cgroup(self) -> str:
        return f"{self.cluster.cgroup}-{self.name}"

    @property
    def link(self) -> str:
        """Name of the node's link on the control plane's bridge."""
        return f"port-{self.name}"


@dataclass(frozen=True)
class Cluster:
    """A cluster's paths and addresses."""

    name: str
    index: int
    root: Path = STATE_ROOT

    @property
    def directory(self) -> Path:
        return self.root / self.name

    @property
    def record(self) -> Path:
        return self.directory / "cluster.json"

    @property
    def pki(self) -> Path:
        return self.directory / "pki"

    @property
    def kubeconfig(self) -> Path:
        return self.directory / "kubeconfig"

    @property
    def policy_kubeconfig(self) -> Path:
        return self.pki / "kube-router.kubeconfig"

    @property
    def logs(self) -> Path:
        return self.directory / "logs"

    @property
    def audit_policy(self) -> Path:
        return self.directory / "control-plane" / "audit-policy.json"

    @property
    def audit_log(self) -> Path:
        """Which ServiceAccount of a user's pods asked the API server for what, a JSON line each."""
        return self.logs / "audit.log"

    @property
    def volumes(self) -> Path:
        return self.directory / "volumes"

    @property
    def spec(self) -> Path:
        """What the control plane's init runs; its path also identifies the init in /proc."""
        return self.directory / "control-plane" / "init.json"

    @property
    def etcd_data(self) -> Path:
        return self.directory / "control-plane" / "etcd"

    @property
    def cgroup(self) -> str:
        return f"trainsync-{self.name}"

    @property
    def host_link(self) -> str:
        return f"tsdc{self.index}"

    @property
    def host_address(self) -> str:
        return f"10.222.{self.index}.1"

    @property
    def address(self) -> str:
        """The control plane's address, with the API server."""
        return f"10.222.{self.index}.2"

    @property
    def subnet(self) -> str:
        return f"10.222.{self.index}.0/24"

    @property
    def pod_cidr(self) -> str:
        return f"10.{128 + self.index}.0.0/16"

    @property
    def service_cidr(self) -> str:
        return f"10.{96 + self.index}.0.0/16"

    @property
    def kubernetes_service(self) -> str:
        return f"10.{96 + self.index}.0.1"

    @property
    def dns_service(self) -> str:
        return f"10.{96 + self.index}.0.10"

    @property
    def server(self) -> str:
        return f"https://{self.address}:{API_PORT}"

    def node(self, number: int) -> Node:
        return Node(self, number)

    def overlaps(self, network: ipaddress.IPv4Network) -> bool:
        """Whether the cluster's ranges overlap with ``network``, such as a route of the host."""
        mine = (self.subnet, self.pod_cidr, self.service_cidr)
        return any(ipaddress.IPv4Network(cidr).overlaps(network) for cidr in mine)
