"""The parts of devcluster that need no cluster."""

from __future__ import annotations

import ipaddress
import itertools
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from devcluster import registry
from devcluster.cli import main
from devcluster.controlplane.reclaimer import empty_directory, released_volumes
from devcluster.controlplane.storage import STORAGE_CLASS, make_volume_directory
from devcluster.errors import DevclusterError
from devcluster.health import Health
from devcluster.monitoring import prometheus
from devcluster.paths import MAX_CLUSTERS, MAX_NODES, Cluster
from devcluster.shell import tail, wait_until, write_atomically
from devcluster.tools import (
    MONITORING_PROGRAMS,
    POLICY_PROGRAMS,
    PROGRAMS,
    Program,
    module_hash,
)

MODULES = Path(__file__).parents[3] / "devcluster" / "tools"


def test_no_two_clusters_share_an_address_a_link_or_a_cgroup() -> None:
    clusters = [Cluster(f"c{index}", index) for index in range(MAX_CLUSTERS)]
    for one, other in itertools.combinations(clusters, 2):
        for cidr in (other.subnet, other.pod_cidr, other.service_cidr):
            assert not one.overlaps(ipaddress.IPv4Network(cidr))
        assert one.host_link != other.host_link


def test_cgroups_of_a_cluster_are_not_those_of_one_whose_name_begins_alike() -> None:
    def roots(name: str) -> set[str]:
        return {Cluster(name, 0).node(number).cgroup for number in range(1, MAX_NODES + 1)}

    assert not roots("dev") & roots("dev-node")
    assert not roots("dev") & roots("dev-node-1")


def test_nodes_of_a_cluster_have_addresses_and_pod_ranges_of_their_own() -> None:
    cluster = Cluster("dev", 3)
    nodes = [cluster.node(number) for number in range(1, MAX_NODES + 1)]
    assert len({node.address for node in nodes}) == MAX_NODES
    assert len({node.pod_cidr for node in nodes}) == MAX_NODES
    subnet = ipaddress.IPv4Network(cluster.subnet)
    assert all(ipaddress.IPv4Address(node.address) in subnet for node in nodes)


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(registry, "STATE_ROOT", tmp_path)
    monkeypatch.setattr(
        registry, "Cluster", lambda name, index: Cluster(name, index, root=tmp_path)
    )
    return tmp_path


def test_a_new_cluster_takes_the_first_index_that_is_free(state: Path) -> None:
    assert registry.allocate("a", 1, "key", []).index == 0
    assert registry.allocate("b", 1, "key", []).index == 1
    (state / "a" / "cluster.json").unlink()
    assert registry.allocate("c", 1, "key", []).index == 0


def test_an_index_whose_ranges_the_machine_reaches_already_is_left_out(state: Path) -> None:
    taken = [ipaddress.IPv4Network("10.96.0.0/12"), ipaddress.IPv4Network("10.222.16.0/24")]
    assert registry.allocate("a", 1, "key", taken).index == 17


def test_no_free_range_is_an_error_that_names_the_routes(state: Path) -> None:
    with pytest.raises(DevclusterError, match=r"10\.0\.0\.0/8"):
        registry.allocate("a", 1, "key", [ipaddress.IPv4Network("10.0.0.0/8")])


def test_a_record_is_read_back_as_written(state: Path) -> None:
    record = registry.allocate("a", 2, "key", [])
    assert registry.read_record("a") == record
    assert registry.read_record("b") is None
    policed = replace(record, policies=True)
    registry.write_record(policed)
    assert registry.read_record("a") == policed


def test_an_older_checkout_can_read_the_record_of_a_cluster_without_policies(state: Path) -> None:
    registry.allocate("a", 2, "key", [])
    known = {"name", "index", "nodes", "tools", "addons"}
    assert set(json.loads((state / "a" / "cluster.json").read_text())) == known


@pytest.mark.parametrize("name", ["", "Dev", "-dev", "dev-", "a/b", "../x", "a" * 21, "1dev"])
def test_a_name_that_cannot_be_a_directory_and_a_cgroup_is_refused(name: str) -> None:
    with pytest.raises(DevclusterError, match="is wrong"):
        registry.check_name(name)


def test_a_cause_hides_its_effects_but_effects_alone_are_told() -> None:
    healthy = {"etcd": "running", "API server": "ready"}
    assert Health(healthy, {"node-1": "Ready"}, {"coredns": "Available"}).faults == []
    broken = {"etcd": "dead", "API server": "not ready"}
    assert Health(broken, {"node-1": "unknown"}, {}).faults == ["etcd is dead"]
    hung = {"etcd": "running", "API server": "not ready"}
    assert Health(hung, {}, {}).faults == ["API server is not ready"]
    assert not Health({}, {}, {}).alive


def test_only_released_volumes_of_our_class_are_reclaimed() -> None:
    def volume(name: str, storage_class: str, phase: str) -> dict[str, object]:
        spec = {"storageClassName": storage_class}
        return {"metadata": {"name": name}, "spec": spec, "status": {"phase": phase}}

    volumes = [
        volume("free", STORAGE_CLASS, "Available"),
        volume("used", STORAGE_CLASS, "Bound"),
        volume("left", STORAGE_CLASS, "Released"),
        volume("foreign", "other", "Released"),
    ]
    assert [one["metadata"]["name"] for one in released_volumes(volumes)] == ["left"]


def test_a_holder_of_an_old_volume_cannot_write_into_the_next(tmp_path: Path) -> None:
    cluster = Cluster("dev", 0, root=tmp_path)
    directory = make_volume_directory(cluster, "v")
    held = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)  # Like a pod's mount.
    try:
        empty_directory(cluster, "v")
        os.close(os.open("late", os.O_CREAT | os.O_WRONLY, dir_fd=held))
    finally:
        os.close(held)
    assert list(directory.iterdir()) == []


def test_a_modules_hash_follows_its_files(tmp_path: Path) -> None:
    (tmp_path / "go.mod").write_text("module a\n")
    first = module_hash(tmp_path)
    assert module_hash(tmp_path) == first
    (tmp_path / "go.sum").write_text("sum\n")
    assert module_hash(tmp_path) != first


@pytest.mark.parametrize(
    "program",
    (*PROGRAMS, *MONITORING_PROGRAMS, *POLICY_PROGRAMS),
    ids=lambda program: program.name,
)
def test_every_program_has_a_module_that_pins_it(program: Program) -> None:
    module = MODULES / program.module
    if program.package == ".":
        assert (module / "main.go").is_file()
        return
    # `tool PACKAGE`, alone or in a block.
    lines = [line.split() for line in (module / "go.mod").read_text().splitlines()]
    assert [program.package] in lines or ["tool", program.package] in lines
    assert (module / "go.sum").is_file()


def test_the_prometheus_is_told_the_version_that_it_is() -> None:
    # Module v0.307.3 is release 3.7.3: the operator writes configuration for that version.
    _, major, minor, patch = prometheus()["spec"]["version"].replace("v", ".").split(".")
    module = f"github.com/prometheus/prometheus v0.{major}{int(minor):02}.{patch}"
    assert module in (MODULES / "prometheus" / "go.mod").read_text()


def test_waiting_ends_with_the_logs_last_lines(tmp_path: Path) -> None:
    log = tmp_path / "etcd.log"
    log.write_text("".join(f"line {number}\n" for number in range(100)))
    with pytest.raises(DevclusterError) as error:
        wait_until(lambda: False, what="etcd", seconds=0, logs=[log])
    assert "waited in vain for etcd" in str(error.value)
    assert "line 99" in str(error.value)
    assert "line 10\n" not in str(error.value)


def test_waiting_ends_at_once_when_what_is_waited_for_has_died() -> None:
    with pytest.raises(DevclusterError, match="it ended with 1"):
        wait_until(lambda: False, what="etcd", seconds=3600, alive=lambda: "it ended with 1")


def test_a_missing_log_does_not_hide_the_error() -> None:
    assert "no such file" in tail([Path("/nonexistent/log")])


def test_a_failed_write_leaves_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "file"
    write_atomically(target, "old")
    monkeypatch.setattr("os.fsync", lambda descriptor: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_atomically(target, "new")
    assert target.read_text() == "old"


@pytest.mark.parametrize("nodes", ["0", "9", "two", "-1"])
def test_a_wrong_number_of_nodes_is_told_in_one_sentence(
    nodes: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NODES", nodes)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert main(["--name", "never-made", "up"]) == 1
    assert "expected a number from 1 to 8" in capsys.readouterr().err


def test_a_user_other_than_root_gets_an_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    assert main(["status"]) == 1
    assert capsys.readouterr().err == (
        "devcluster: devcluster needs root on Linux: it makes namespaces and mounts\n"
    )
