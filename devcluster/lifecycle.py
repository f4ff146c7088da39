"""Starts, repairs and removes a cluster; kills and restarts a node."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime

from devcluster.addons import addons_key, apply_addons, unavailable_addons
from devcluster.controlplane.kubeapi import KubeApi
from devcluster.controlplane.pki import ensure_control_plane_pki
from devcluster.controlplane.servers import (
    SERVERS,
    STORE,
    start_members,
    start_namespaces,
    wait_for_api,
)
from devcluster.controlplane.storage import ensure_volume_directories
from devcluster.errors import DevclusterError
from devcluster.health import examine, heard_from, ready_nodes
from devcluster.hosts import cgroups, network
from devcluster.hosts.node import node_component, prepare_node, start_agents, start_runtime
from devcluster.hosts.policy_controller import start_controller
from devcluster.hosts.processes import find_init, kill_init, require_init
from devcluster.images.imageload import load_images
from devcluster.images.images import pack_images
from devcluster.packages import ensure_packages
from devcluster.paths import MAX_NODES, STATE_ROOT, Cluster, Node
from devcluster.registry import Record, allocate, cluster_lock, read_record, write_record
from devcluster.shell import Progress, wait_until
from devcluster.tools import Tools, ensure_policy_tools, ensure_tools, tools_key

_READY_SECONDS = 120


def up(name: str, nodes: int | None, progress: Progress) -> Cluster:
    """Ensure a healthy cluster with at least ``nodes`` nodes (one, if None).

    Does nothing for a healthy cluster and repairs dead parts. Makes a new cluster when the
    namespaces are gone, when the pinned programs have changed, or when the repair fails.
    """
    with cluster_lock(name, progress):
        record = read_record(name)
        if record is None:
            return _create(name, nodes or 1, progress)
        wanted = replace(record, nodes=max(record.nodes, nodes or 1))
        if _keep(record, wanted, progress):
            return record.cluster
        return _create(name, wanted.nodes, progress)


def _keep(record: Record, wanted: Record, progress: Progress) -> bool:
    """Whether the cluster matches the request, after a repair if needed.

    False if a new cluster must be made.
    """
    health = examine(wanted)
    what = f"cluster {record.name!r}"
    if record.tools != tools_key():
        progress.say(f"{what} runs other versions than this checkout pins: making it anew")
        return False
    if not health.alive:
        progress.say(f"{what} is half dead, its namespaces are gone: making it anew")
        return False
    faults = health.faults
    if record.addons != addons_key(record.cluster) and not faults:
        faults = ["it lacks today's storage, CoreDNS and KubeRay manifests"]
    if not faults:
        progress.say(f"{what} is up already, {_nodes(wanted.nodes)}")
        return True
    progress.say(f"{what} needs work, {'; '.join(faults)}: repairing it")
    try:
        _start(wanted, ensure_tools(progress), progress)
    except DevclusterError as error:
        progress.say(f"the repair failed, making {what} anew: {error}")
        return False
    return True


def _create(name: str, nodes: int, progress: Progress) -> Cluster:
    ensure_packages(progress)
    tools = ensure_tools(progress)
    _remove(name)
    record = allocate(name, nodes, tools.key, network.host_networks())
    progress.say(f"starting cluster {name!r}, {_nodes(nodes)}, may take half a minute")
    _start(record, tools, progress)
    return record.cluster


def _start(record: Record, tools: Tools, progress: Progress) -> None:
    """Start all parts that do not run, in the order of dependencies, and wait until all are
    healthy."""
    cluster = record.cluster
    nodes = [cluster.node(number) for number in range(1, record.nodes + 1)]
    # Until this has ended, the record shows that the add-ons are not applied.
    write_record(replace(record, addons=""))
    archives = pack_images(tools, cluster.directory / "images")
    ensure_control_plane_pki(cluster)
    ensure_volume_directories(cluster)
    _each(nodes, prepare_node)
    start_namespaces(cluster)
    inits = [node_component(node) for node in nodes]
    start_members(cluster, tools, STORE, inits)

    def make_runtime(node: Node) -> None:
        start_runtime(node, tools)
        load_images([node], archives, progress)

    with ThreadPoolExecutor() as pool:
        # In parallel with the API server: start the nodes' containerd and load images.
        runtimes = [pool.submit(make_runtime, node) for node in nodes]
        wait_for_api(cluster)
        progress.say("API server ready")
        start_members(cluster, tools, (*STORE, *SERVERS), inits)
        addons = pool.submit(apply_addons, cluster, tools)
        for runtime in runtimes:
            runtime.result()
        since = datetime.now(UTC)
        _each(nodes, lambda node: start_agents(node, tools))
        addons.result()
    wait_for_nodes(cluster, nodes, since, progress)
    _enforce_policies(record, nodes, tools, progress)
    wait_for_addons(cluster, progress)
    write_record(replace(record, addons=addons_key(cluster)))


def wait_for_nodes(
    cluster: Cluster, nodes: Sequence[Node], since: datetime, progress: Progress
) -> None:
    """Wait until these nodes are Ready and their kubelets have renewed a Lease after ``since``."""
    api = KubeApi(cluster)
    names = {node.name for node in nodes}
    shown = ", ".join(sorted(names))
    wait_until(
        lambda: names <= ready_nodes(api) and names <= heard_from(api, since),
        what=f"{shown} to be Ready",
        seconds=_READY_SECONDS,
        logs=[node.logs / "kubelet.log" for node in nodes],
    )
    progress.say(f"{shown} Ready")


def wait_for_addons(cluster: Cluster, progress: Progress) -> None:
    """Wait until CoreDNS and KubeRay are Available."""
    api = KubeApi(cluster)
    wait_until(
        lambda: not unavailable_addons(api),
        what="CoreDNS and KubeRay to be Available",
        seconds=_READY_SECONDS,
        logs=[cluster.node(1).logs / "kubelet.log"],
    )
    progress.say("CoreDNS and KubeRay Available")


def down(name: str, progress: Progress) -> None:
    """End a cluster and remove all its files and links."""
    with cluster_lock(name, progress):
        existed = read_record(name) is not None
        _remove(name)
    progress.say(f"cluster {name!r} is gone" if existed else f"there is no cluster {name!r}")


def _remove(name: str) -> None:
    directory = STATE_ROOT / name
    if not directory.exists():
        return
    record = read_record(name)
    if record is not None:
        cluster = record.cluster
        # One kill: the kernel ends all processes of the namespaces and removes mounts, links and
        # rules.
        kill_init(cluster.spec)
        network.remove_host_link(cluster)
        cgroups.remove(cluster.node(number).cgroup for number in range(1, MAX_NODES + 1))
    # Renamed first: a half-deleted directory must not look like a cluster.
    trash = STATE_ROOT / f".removed-{name}-{time.time_ns()}"
    directory.rename(trash)
    shutil.rmtree(trash)


def kill_node(name: str, node_name: str, progress: Progress) -> None:
    """Kill a node at once, like a power cut."""
    with cluster_lock(name, progress):
        node = find_node(require_record(name), node_name)
        if not kill_init(node.spec):
            raise DevclusterError(f"{node_name} of cluster {name!r} is not running")
    progress.say(f"{node_name} killed; `node-start {node_name}` brings it back")


def cut_node(name: str, node_name: str, seconds: float, progress: Progress) -> None:
    """Cut a node off from all others and from the API server, for so long."""
    record = require_record(name)
    node = find_node(record, node_name)
    pid = require_init(record.cluster.spec, f"the control plane of cluster {name!r}")
    progress.say(f"{node_name} is cut off for {seconds:g} s")
    network.cut(node, pid, seconds)


def start_node(name: str, node_name: str, progress: Progress) -> None:
    """Restart a killed node with its disk, and wait until the node is Ready."""
    with cluster_lock(name, progress):
        record = require_record(name)
        cluster, node = record.cluster, find_node(record, node_name)
        if find_init(node.spec) is not None:
            raise DevclusterError(f"{node_name} of cluster {name!r} is running already")
        tools = ensure_tools(progress)
        prepare_node(node)
        others = [cluster.node(number) for number in range(1, record.nodes + 1)]
        running = [other for other in others if other == node or find_init(other.spec)]
        inits = [node_component(one) for one in running]
        start_members(cluster, tools, (*STORE, *SERVERS), inits)
        start_runtime(node, tools)
        since = datetime.now(UTC)
        start_agents(node, tools)
        wait_for_nodes(cluster, [node], since, progress)
        _enforce_policies(record, [node], tools, progress)


def require_record(name: str) -> Record:
    record = read_record(name)
    if record is None:
        raise DevclusterError(f"there is no cluster {name!r}: run `up` first")
    return record


def find_node(record: Record, node_name: str) -> Node:
    """A node by its name. Raises DevclusterError with the existing names."""
    nodes = [record.cluster.node(number) for number in range(1, record.nodes + 1)]
    for node in nodes:
        if node.name == node_name:
            return node
    names = ", ".join(node.name for node in nodes)
    raise DevclusterError(f"cluster {record.name!r} has no node {node_name!r}, only {names}")


def _enforce_policies(
    record: Record, nodes: Sequence[Node], tools: Tools, progress: Progress
) -> None:
    """Start the policy controllers of these nodes, if the cluster was asked for them."""
    if record.policies:
        policies = ensure_policy_tools(progress)
        _each(nodes, lambda node: start_controller(node, tools, policies))


def _each(nodes: Sequence[Node], work: Callable[[Node], None]) -> None:
    """Run a function for every node, in parallel; raises the first error."""
    with ThreadPoolExecutor() as pool:
        for done in [pool.submit(work, node) for node in nodes]:
            done.result()


def _nodes(count: int) -> str:
    return "1 node" if count == 1 else f"{count} nodes"
