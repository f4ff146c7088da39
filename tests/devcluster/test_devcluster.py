"""devcluster's commands, on a cluster apart from the other tests'."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from devcluster.controlplane.kubeapi import KubeApi
from devcluster.hosts import cgroups
from devcluster.hosts.network import host_link_up, host_networks
from devcluster.hosts.processes import find_init
from devcluster.images.ociimage import File, ImageConfig, layer_from_files, write_docker_archive
from devcluster.paths import MAX_NODES, STATE_ROOT, Cluster
from devcluster.registry import read_record
from devcluster.shell import Progress
from devcluster.tools import ensure_tools

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(240),
    pytest.mark.skipif(
        sys.platform != "linux" or os.geteuid() != 0, reason="devcluster needs root on Linux"
    ),
]

NAME = "selftest"


def devcluster(*words: str, code: int = 0) -> str:
    """Run a devcluster command on the test's cluster; returns stdout and stderr."""
    done = subprocess.run(
        [sys.executable, "-m", "devcluster", "--name", NAME, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
        env={**os.environ, "NODES": ""},
    )
    assert done.returncode == code, done.stdout
    return done.stdout


@pytest.fixture(scope="module", autouse=True)
def tidy() -> Iterator[None]:
    devcluster("down")
    yield
    devcluster("down")


@pytest.fixture
def cluster() -> Cluster:
    """A healthy cluster, repaired after the test before."""
    devcluster("up")
    record = read_record(NAME)
    assert record is not None
    return record.cluster


def until(condition: Callable[[], bool], what: str, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} s: {what}"
        time.sleep(0.1)


def is_well() -> bool:
    """Whether `devcluster status` reports no fault."""
    words = [sys.executable, "-m", "devcluster", "--name", NAME, "status"]
    return subprocess.run(words, capture_output=True, timeout=200).returncode == 0


def processes_named(*parts: str) -> list[int]:
    """Pids of the processes with all of ``parts`` in their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            words = entry.joinpath("cmdline").read_bytes().decode(errors="replace")
        except (FileNotFoundError, NotADirectoryError, ProcessLookupError):
            continue
        if entry.name.isdigit() and all(part in words for part in parts):
            found.append(int(entry.name))
    return found


def processes_in_pid_namespaces(namespaces: set[int]) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and entry.joinpath("ns/pid").stat().st_ino in namespaces:
                found.append(int(entry.name))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # The process has ended, or is the machine's process 1, which is not readable.
    return found


def pid_namespace(pid: int) -> int:
    return Path(f"/proc/{pid}/ns/pid").stat().st_ino


def kubectl(cluster: Cluster, *words: str, stdin: str | None = None) -> str:
    program = ensure_tools(Progress()).path("kubectl")
    return subprocess.run(
        [program, f"--kubeconfig={cluster.kubeconfig}", *words],
        input=stdin,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout


def test_second_up_does_nothing_and_says_so(cluster: Cluster) -> None:
    before = find_init(cluster.spec)
    start = time.monotonic()
    said = devcluster("up")
    assert time.monotonic() - start < 2
    assert "is up already" in said
    assert find_init(cluster.spec) == before


def test_up_repairs_a_killed_api_server_without_losing_the_cluster(cluster: Cluster) -> None:
    kubectl(cluster, "create", "configmap", "kept", "--from-literal=a=b")
    init = find_init(cluster.spec)
    (server,) = processes_named("kube-apiserver", str(cluster.pki))
    os.kill(server, signal.SIGKILL)
    until(lambda: not KubeApi(cluster).ready(), "the API server is gone")

    shown = "kube-apiserver            dead"  # once process 1 has reaped the server
    until(lambda: shown in devcluster("status", code=1), "the status shows the dead server")
    assert "kube-apiserver is dead" in devcluster("up")

    assert find_init(cluster.spec) == init
    assert kubectl(cluster, "get", "configmap", "kept", "-o", "jsonpath={.data.a}") == "b"
    devcluster("status")


def test_a_killed_node_is_gone_until_it_is_started(cluster: Cluster) -> None:
    namespace = pid_namespace(find_init(cluster.node(1).spec) or 0)
    devcluster("node-kill", "node-1")
    assert processes_in_pid_namespaces({namespace}) == []
    assert "node-1                    not running" in devcluster("status", code=1)
    assert "is not running" in devcluster("node-kill", "node-1", code=1)

    devcluster("node-start", "node-1")

    assert "is running already" in devcluster("node-start", "node-1", code=1)
    devcluster("up")
    # The API server may still report the pods from before the kill as ready when `up` checks.
    until(is_well, "what was on the node is well again", 120)


def test_up_makes_the_cluster_anew_when_its_namespaces_are_gone(cluster: Cluster) -> None:
    init = find_init(cluster.spec)
    assert init is not None
    os.kill(init, signal.SIGKILL)
    until(lambda: find_init(cluster.spec) is None, "the init is gone")

    assert "namespaces are gone: making it anew" in devcluster("up")

    devcluster("status")


def test_a_volume_is_emptied_and_free_again_after_its_claim(cluster: Cluster) -> None:
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "used"},
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "resources": {"requests": {"storage": "1Gi"}},
        },
    }
    api = KubeApi(cluster)
    path = "/api/v1/namespaces/default/persistentvolumeclaims/used"
    kubectl(cluster, "create", "-f", "-", stdin=json.dumps(claim))
    until(lambda: api.get(path)["status"].get("phase") == "Bound", "the claim is bound")
    volume = api.get(path)["spec"]["volumeName"]
    left = cluster.volumes / volume / "left"
    left.mkdir()
    left.joinpath("file").write_text("from the first claim")

    kubectl(cluster, "delete", "pvc", "used")

    def phase() -> str:
        return str(api.get(f"/api/v1/persistentvolumes/{volume}")["status"]["phase"])

    until(lambda: phase() == "Available", f"{volume} is free")
    assert list((cluster.volumes / volume).iterdir()) == []
    assert (cluster.volumes / volume).stat().st_mode & 0o777 == 0o777


def test_load_image_skips_what_is_there_and_replaces_what_changed(
    cluster: Cluster, tmp_path: Path
) -> None:
    def pack(content: bytes) -> Path:
        layer = layer_from_files({"/file": File(content)}, tmp_path / "layer.tar")
        archive = tmp_path / "image.tar"
        write_docker_archive(archive, "selftest/image:1", [layer], ImageConfig(cmd=["/file"]))
        return archive

    assert "loaded selftest/image:1" in devcluster("load-image", str(pack(b"one")))
    assert "loaded" not in devcluster("load-image", str(pack(b"one")))
    assert "loaded selftest/image:1" in devcluster("load-image", str(pack(b"two")))


def test_load_image_refuses_a_file_that_is_no_image(cluster: Cluster, tmp_path: Path) -> None:
    nonsense = tmp_path / "nonsense.tar"
    nonsense.write_text("nonsense")
    assert "is no docker-archive" in devcluster("load-image", str(nonsense), code=1)


def test_down_leaves_no_process_rule_link_route_mount_or_cgroup(cluster: Cluster) -> None:
    rules = subprocess.run(["iptables-save"], capture_output=True, text=True, check=True).stdout
    inits = [find_init(cluster.spec), find_init(cluster.node(1).spec)]
    namespaces = {pid_namespace(pid) for pid in inits if pid is not None}
    roots = [cluster.node(number).cgroup for number in range(1, MAX_NODES + 1)]
    assert len(namespaces) == 2
    assert len(processes_in_pid_namespaces(namespaces)) > 8
    assert host_link_up(cluster)
    assert cgroups.existing(roots)

    devcluster("down")

    assert processes_in_pid_namespaces(namespaces) == []
    assert processes_named(str(cluster.directory)) == []
    assert not host_link_up(cluster)
    assert not any(cluster.overlaps(network) for network in host_networks())
    assert cgroups.existing(roots) == []
    assert str(cluster.directory) not in Path("/proc/self/mounts").read_text()
    assert not cluster.directory.exists()
    assert not list(STATE_ROOT.glob(f".removed-{NAME}-*"))
    after = subprocess.run(["iptables-save"], capture_output=True, text=True, check=True).stdout
    assert _without_counters(after) == _without_counters(rules)
    assert "there is no cluster" in devcluster("down")


def _without_counters(rules: str) -> list[str]:
    return [line.split(" [")[0] for line in rules.splitlines() if not line.startswith("#")]
