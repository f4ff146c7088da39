"""The real API server refuses invalid TrainingRuns and names the field and the remedy."""

from typing import Any

import pytest

from tests.cluster.conftest import Kubectl
from tests.cluster.manifests import (
    adapted,
    autoscaled,
    changed,
    full,
    minimal,
    served,
    served_by_store,
    stored,
)

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("crd")]

EXPLORER = {"name": "explorer", "role": "Explorer"}
TRAINER = {"name": "second", "role": "Trainer"}
OTHER_CLUSTER = {
    "name": "other",
    "rayVersion": "2.60.0",
    "image": "registry.example/ray:1",
    "entrypoint": "python -m explore",
    "groups": [EXPLORER],
}
CLUSTER = "spec.clusters.0"
SERVERS = served()["spec"]["servers"]
PATH = "spec.checkpoint.path"
CLAIM = "spec.checkpoint.storage.volumeClaimTemplate"
STORAGE = "spec.checkpoint.storage"
IN_BUCKET = {"objectStore": {"url": "s3://bucket/run"}}
KEYS = {"secretRef": {"name": "bucket-keys"}}

ADAPTER = adapted()["spec"]["servers"][0]["adapter"]
WITHOUT_LAYERS = {k: v for k, v in ADAPTER["config"].items() if k != "target_modules"}


def _adapted(**changes: Any) -> list[Any]:
    """One entry of servers with an adapter."""
    return [{**adapted()["spec"]["servers"][0], **changes}]


# changed field of the minimal manifest, new value, field in the message, remedy in the message
WRONG: dict[str, tuple[str, Any, str, str]] = {
    "name with a dot": ("metadata.name", "my.run", "metadata.name", "hold only lower-case letters"),
    "name that begins with a digit": (
        "metadata.name", "1run", "metadata.name", "begin with a letter"),
    "names too long together": (
        "metadata.name", "r" * 39, "spec.clusters[].name", "shorten one of the two"),
    "no clusters": ("spec.clusters", [], "spec.clusters", "at least 1 items"),
    "clusters left out": ("spec.clusters", ..., "spec.clusters", "Required value"),
    "too many clusters": (
        "spec.clusters", [{**OTHER_CLUSTER, "name": f"c{n}"} for n in range(9)],
        "spec.clusters", "must have at most 8 items"),
    "cluster without a name": (f"{CLUSTER}.name", ..., "spec.clusters[0].name", "Required value"),
    "cluster name in capitals": (
        f"{CLUSTER}.name", "Main", "spec.clusters[].name", "must be lower-case letters"),
    "two clusters of one name": (
        "spec.clusters.1", {**OTHER_CLUSTER, "name": "main"}, "spec.clusters[1]",
        "Duplicate value"),
    "version of Ray left out": (
        f"{CLUSTER}.rayVersion", ..., "spec.clusters[0].rayVersion", "Required value"),
    "version of Ray incomplete": (
        f"{CLUSTER}.rayVersion", "2.60", "spec.clusters[].rayVersion", "such as 2.60.0"),
    "version of Ray as a number": (
        f"{CLUSTER}.rayVersion", 2.6, "spec.clusters[0].rayVersion", "must be of type string"),
    "no groups": (f"{CLUSTER}.groups", [], "spec.clusters[0].groups", "at least 1 items"),
    "no trainer": (
        f"{CLUSTER}.groups.0.role", "Explorer", "spec.clusters[].groups", "add the missing one"),
    "two trainer groups": (
        f"{CLUSTER}.groups.1", TRAINER, "spec.clusters[].groups", "make the others Explorer"),
    "explorerReplicas without explorers": (
        "spec.explorerReplicas", 2, "spec.explorerReplicas", "exactly one group of role Explorer"),
    "copies with a neighbour that one trainer pod has not": (
        "spec.checkpoint.memory", {"budget": "1Gi", "copies": 1},
        "spec.checkpoint.memory.copies", "2 replicas or more of the group of role Trainer"),
    "a step to go back to below zero": (
        "spec.resumeFrom", {"step": -1}, "spec.resumeFrom.step",
        "should be greater than or equal to 0"),
    "an override that is not KubeRay's": (
        f"{CLUSTER}.rayClusterOverrides", {"rayVersion": "2.60.0"},
        "spec.clusters[0].rayClusterOverrides.rayVersion", "unknown field"),
    "an autoscaler without a group to scale": (
        f"{CLUSTER}.rayClusterOverrides", {"enableInTreeAutoscaling": True},
        "enableInTreeAutoscaling", "set both"),
    "options of an autoscaler that is off": (
        f"{CLUSTER}.rayClusterOverrides", {"autoscalerOptions": {}}, "autoscalerOptions",
        "remove the options"),
    "explorers to scale without an autoscaler": (
        f"{CLUSTER}.groups.1", {**EXPLORER, "minReplicas": 1, "maxReplicas": 2},
        "enableInTreeAutoscaling", "set both"),
    "trainers to scale": (
        f"{CLUSTER}.groups.0.maxReplicas", 2, "maxReplicas", "is for role Explorer"),
    "replicas outside of their bounds": (
        f"{CLUSTER}.groups.1", {**EXPLORER, "minReplicas": 2, "maxReplicas": 3},
        "spec.clusters[].groups[].replicas", "between minReplicas and maxReplicas"),
    "unknown role": (
        f"{CLUSTER}.groups.0.role", "Actor", "spec.clusters[0].groups[0].role",
        'supported values: "Trainer", "Explorer"'),
    "two groups of one name": (
        f"{CLUSTER}.groups.1", {"name": "trainer", "role": "Explorer"},
        "spec.clusters[0].groups[1]", "Duplicate value"),
    "group with the name of KubeRay's head": (
        f"{CLUSTER}.groups.0.name", "headgroup", "spec.clusters[].groups[].name", "choose another"),
    "group with Kueue's name of the head": (
        f"{CLUSTER}.groups.0.name", "head", "spec.clusters[].groups[].name", "choose another"),
    "more groups than Kueue takes": (
        f"{CLUSTER}.groups", [TRAINER, *({"name": f"e{n}", "role": "Explorer"} for n in range(7))],
        "spec.clusters[].groups", "at most 7"),
    "no replicas": (
        f"{CLUSTER}.groups.0.replicas", 0, "spec.clusters[0].groups[0].replicas",
        "should be greater than or equal to 1"),
    "no entrypoint": (
        f"{CLUSTER}.entrypoint", ..., "spec.clusters[].entrypoint", "give the command that trains"),
    "blank entrypoint": (
        f"{CLUSTER}.entrypoint", "  ", "spec.clusters[].entrypoint", "must be a command"),
    "no image anywhere": (
        f"{CLUSTER}.image", ..., "spec.clusters[].image", "set the cluster's image"),
    "image with a space": (
        f"{CLUSTER}.image", "ray 1", "spec.clusters[].image", "without spaces"),
    "second container without an image": (
        f"{CLUSTER}.groups.0.template", {"spec": {"containers": [{"name": "a"}, {"name": "b"}]}},
        "groups[].template", "one on every container"),
    "container of the head without an image": (
        f"{CLUSTER}.head",
        {"template": {"spec": {"containers": [{"name": "a", "image": "x"}, {"name": "b"}]}}},
        "head.template", "one on every container"),
    "template without containers": (
        f"{CLUSTER}.groups.0.template", {"spec": {"containers": []}},
        "spec.clusters[0].groups[0].template.spec.containers", "at least 1 items"),
    "explorers in another cluster": (
        "spec.clusters.1", OTHER_CLUSTER, "spec.sync.method memory", "choose nccl, checkpoint"),
    "explorers in another cluster without a job": (
        "spec.clusters.1", {k: v for k, v in OTHER_CLUSTER.items() if k != "entrypoint"},
        "spec.clusters[].entrypoint", "must be set on each cluster"),
    "unknown sync method": (
        "spec.sync.method", "carrier-pigeon", "spec.sync.method", 'supported values: "memory"'),
    "sync interval zero": (
        "spec.sync.interval", 0, "spec.sync.interval", "greater than or equal to 1"),
    "bucket size with another method": (
        "spec.sync.bucketSize", "64Mi", "spec.sync.bucketSize", "remove it with any other"),
    "deltas with a method that has none": (
        "spec.sync", {"method": "checkpoint", "delta": True},
        "spec.sync.delta", "choose another method"),
    "deltas with a method that has its own": (
        "spec.sync", {**stored()["spec"]["sync"], "delta": True},
        "spec.sync.delta", "choose another method"),
    "store of weights with another method": (
        "spec.sync", {**stored()["spec"]["sync"], "method": "nccl"},
        "spec.sync.store", "remove it with any other method"),
    "method store without one": (
        "spec.sync.method", "store", "spec.sync.store", "set it there"),
    "store of weights without a prefix": (
        "spec.sync", {"method": "store", "store": {"url": "s3://bucket"}},
        "spec.sync.store.url", "must be s3://bucket/prefix"),
    "store of weights by plain http": (
        "spec.sync",
        {"method": "store", "store": {"url": "s3://bucket/run", "endpoint": "http://s3.example"}},
        "spec.sync.store", "set allowHttp"),
    "bucket size that is no quantity": (
        "spec.sync", {"method": "nccl", "bucketSize": "big"}, "spec.sync.bucketSize", "such as"),
    "bucket size of thousandths": (
        "spec.sync", {"method": "nccl", "bucketSize": "2000000000m"},
        "spec.sync.bucketSize", "such as"),
    "bucket size with a sign": (
        "spec.sync", {"method": "nccl", "bucketSize": "+16Mi"}, "spec.sync.bucketSize", "such as"),
    "bucket size with an exponent": (
        "spec.sync", {"method": "nccl", "bucketSize": "1e+7"}, "spec.sync.bucketSize", "such as"),
    "bucket size below the smallest": (
        "spec.sync", {"method": "nccl", "bucketSize": "64Ki"},
        "spec.sync.bucketSize", "from 1Mi to 16Gi"),
    "bucket size above the largest": (
        "spec.sync", {"method": "nccl", "bucketSize": 1 << 40},
        "spec.sync.bucketSize", "from 1Mi to 16Gi"),
    "memory without a budget": (
        "spec.checkpoint.memory", {}, "spec.checkpoint.memory.budget", "Required value"),
    "memory that is no quantity": (
        "spec.checkpoint.memory", {"budget": "much"}, "spec.checkpoint.memory.budget", "such as"),
    "memory below the smallest": (
        "spec.checkpoint.memory", {"budget": "64Ki"},
        "spec.checkpoint.memory.budget", "at least 1Mi"),
    "mirror without a prefix": (
        "spec.checkpoint.mirror", {"url": "s3://bucket"},
        "spec.checkpoint.mirror.url", "must be s3://bucket/prefix"),
    "mirror with a password": (
        "spec.checkpoint.mirror", {"url": "s3://me:secret@bucket/run"},
        "spec.checkpoint.mirror.url", "must be s3://bucket/prefix"),
    "mirror by plain http": (
        "spec.checkpoint.mirror", {"url": "s3://bucket/run", "endpoint": "http://s3.example.com"},
        "spec.checkpoint.mirror", "set allowHttp"),
    "endpoint of a mirror in GCS": (
        "spec.checkpoint.mirror", {"url": "gs://bucket/run", "endpoint": "https://s3.example.com"},
        "spec.checkpoint.mirror", "s3:// and az:// alone"),
    "region of a mirror in Azure": (
        "spec.checkpoint.mirror", {"url": "az://bucket/run", "region": "eu"},
        "spec.checkpoint.mirror", "for s3:// alone"),
    "mirror that is too slow": (
        "spec.checkpoint.mirror", {"url": "s3://bucket/run", "uploadBytesPerSecond": "1Ki"},
        "spec.checkpoint.mirror.uploadBytesPerSecond", "at least 1Mi"),
    "unknown sync style": (
        "spec.sync.style", "hasty", "spec.sync.style", 'supported values: "fixed"'),
    "sync offset above the interval": (
        "spec.sync", {"interval": 2, "offset": 3}, "spec.sync.offset", "lower it, or remove it"),
    "sync offset with another style": (
        "spec.sync", {"style": "trainer_driven", "offset": 1},
        "spec.sync.offset", "0 with any other style"),
    "negative sync offset": (
        "spec.sync.offset", -1, "spec.sync.offset", "greater than or equal to 0"),
    "bounded staleness without the bound": (
        "spec.sync.style", "fully_async", "spec.sync.maxStaleness", "set it there"),
    "bound of staleness with another style": (
        "spec.sync.maxStaleness", 2, "spec.sync.maxStaleness", "remove it with any other"),
    "bound of staleness below the interval": (
        "spec.sync", {"style": "fully_async", "interval": 4, "maxStaleness": 2},
        "spec.sync.maxStaleness", "lower the interval"),
    "servers with a method that commits and stores nothing": (
        "spec.servers", SERVERS, "spec.servers follow committed or stored weights",
        "or remove the servers"),
    "two entries of servers of one name": (
        "spec.servers", [SERVERS[0], SERVERS[0]], "spec.servers[1]", "Duplicate value"),
    "servers without a template": (
        "spec.servers", [{"name": "a", "engine": "VLLM"}], "spec.servers[0].template",
        "Required value"),
    "container of a server without an image": (
        "spec.servers", [{**SERVERS[0], "template": {"spec": {"containers": [{"name": "a"}]}}}],
        "spec.servers[0].template.spec.containers[0].image", "Required value"),
    "driver of vLLM servers": (
        "spec.servers", [{**SERVERS[0], "driver": "mine.servers:make"}],
        "spec.servers[].driver is for engine Custom, which needs one", "set it there alone"),
    "custom servers without a driver": (
        "spec.servers", [{**SERVERS[1], "engine": "Custom"}],
        "spec.servers[].driver is for engine Custom, which needs one", "set it there alone"),
    "driver that is no function of a module": (
        "spec.servers", [{**SERVERS[1], "engine": "Custom", "driver": "mine.servers"}],
        "spec.servers[0].driver", "must be a function of a module"),
    "SGLang servers that prepare": (
        "spec.servers", [{**SERVERS[0], "engine": "SGLang", "sync": {"prepareSeconds": 1}}],
        "spec.servers[].sync.prepareSeconds is for engine VLLM alone", "set it to 0"),
    "vLLM servers with a route of SGLang": (
        "spec.servers", [{**SERVERS[0], "sync": {"sglangRoute": "tensor"}}],
        "spec.servers[].sync.sglangRoute is for engine SGLang alone", "set it to disk"),
    "SGLang servers with a route of none": (
        "spec.servers", [{**SERVERS[0], "engine": "SGLang", "sync": {"sglangRoute": "mail"}}],
        "spec.servers[0].sync.sglangRoute", 'supported values: "disk", "tensor"'),
    "adapter of SGLang servers": (
        "spec.servers", _adapted(engine="SGLang"),
        "spec.servers[].adapter is for engine VLLM alone", "remove it"),
    "adapter of servers of several nodes": (
        "spec.servers", _adapted(nodes=2),
        "spec.servers[].adapter is for servers of one node", "set nodes to 1"),
    "adapter of servers that prepare": (
        "spec.servers", _adapted(sync={"prepareSeconds": 1}),
        "spec.servers[].sync.prepareSeconds is for whole models", "set it to 0"),
    "adapter of one entry of two": (
        "spec.servers", [*_adapted(), SERVERS[1]],
        "spec.servers[].adapter must be set on all entries or on none", "or remove it"),
    "adapter without a name": (
        "spec.servers", _adapted(adapter={"config": ADAPTER["config"]}),
        "spec.servers[0].adapter.name", "Required value"),
    "adapter of an empty name": (
        "spec.servers", _adapted(adapter={**ADAPTER, "name": ""}),
        "spec.servers[].adapter.name", "such as rollout"),
    "adapter whose name has a space": (
        "spec.servers", _adapted(adapter={**ADAPTER, "name": "my adapter"}),
        "spec.servers[].adapter.name", "such as rollout"),
    "adapter without a configuration": (
        "spec.servers", _adapted(adapter={"name": "a"}),
        "spec.servers[0].adapter.config", "Required value"),
    "adapter of another kind than LoRA": (
        "spec.servers",
        _adapted(adapter={**ADAPTER, "config": {**ADAPTER["config"], "peft_type": "IA3"}}),
        "spec.servers[0].adapter.config.peft_type", 'supported values: "LORA"'),
    "adapter of rank 0": (
        "spec.servers", _adapted(adapter={**ADAPTER, "config": {**ADAPTER["config"], "r": 0}}),
        "spec.servers[0].adapter.config.r", "greater than or equal to 1"),
    "adapter that does not say of which layers": (
        "spec.servers", _adapted(adapter={**ADAPTER, "config": WITHOUT_LAYERS}),
        "spec.servers[0].adapter.config.target_modules", "Required value"),
    "SGLang servers of several nodes": (
        "spec.servers", [{**SERVERS[0], "engine": "SGLang", "nodes": 2}],
        "spec.servers[].nodes above 1 is for engine VLLM alone", "set it to 1"),
    "servers of no node": (
        "spec.servers", [{**SERVERS[0], "nodes": 0}], "spec.servers[0].nodes",
        "should be greater than or equal to 1"),
    "servers of an engine that no agent knows": (
        "spec.servers", [{**SERVERS[0], "engine": "Other"}], "spec.servers[0].engine",
        'supported values: "VLLM", "SGLang"'),
    "an SGLang server that is to wait for requests": (
        "spec.servers", [{**SERVERS[0], "engine": "SGLang", "sync": {"pause": "wait"}}],
        "spec.servers[].sync.pause wait is not for SGLang", "choose keep or abort"),
    "a server on its agent's port": (
        "spec.servers", [{**SERVERS[0], "port": 8090}], "spec.servers[].port",
        "let the server listen on another"),
    "no checkpoint": ("spec.checkpoint", ..., "spec.checkpoint", "Required value"),
    "no storage": ("spec.checkpoint.storage", {}, "spec.checkpoint.storage", "set the one"),
    "bucket beside a claim": (
        "spec.checkpoint.storage.objectStore", {"url": "s3://bucket/run"},
        "spec.checkpoint.storage", "remove the others"),
    "bucket without a prefix": (
        STORAGE, {"objectStore": {"url": "s3://bucket"}},
        "spec.checkpoint.storage.objectStore.url", "must be s3://bucket/prefix"),
    "bucket by plain http": (
        STORAGE, {"objectStore": {"url": "s3://bucket/run", "endpoint": "http://s3.example.com"}},
        "spec.checkpoint.storage.objectStore", "set allowHttp"),
    "path in a bucket": (
        "spec.checkpoint", {"storage": IN_BUCKET, "path": "team/run-1"},
        "spec.checkpoint.path", "remove them"),
    "mirror of a bucket": (
        "spec.checkpoint", {"storage": IN_BUCKET, "mirror": {"url": "s3://bucket/other"}},
        "mirror", "remove them"),
    "keys to read commits that nobody reads": (
        STORAGE, {"objectStore": {**IN_BUCKET["objectStore"], "readCredentials": KEYS}},
        "spec.checkpoint.storage.objectStore.readCredentials", "remove it with any other"),
    "bound of uploads that is no quantity": (
        STORAGE, {"objectStore": {**IN_BUCKET["objectStore"], "uploadBytesPerSecond": "+2Mi"}},
        "spec.checkpoint.storage.objectStore.uploadBytesPerSecond", "such as 200Mi"),
    "both storages": (CLAIM, {"size": "1Gi"}, "spec.checkpoint.storage", "remove the other"),
    "claim of size zero": (
        "spec.checkpoint.storage", {"volumeClaimTemplate": {"size": "0"}},
        "volumeClaimTemplate.size", "such as 500Gi"),
    "claim of no size": (
        "spec.checkpoint.storage", {"volumeClaimTemplate": {"size": "big"}},
        "volumeClaimTemplate.size", "such as 500Gi"),
    "claim that is read only": (
        "spec.checkpoint.storage",
        {"volumeClaimTemplate": {"size": "1Gi", "accessModes": ["ReadOnlyMany"]}},
        "volumeClaimTemplate.accessModes[0]", 'supported values: "ReadWriteMany"'),
    "path that is absolute": (PATH, "/etc", PATH, "remove the leading '/'"),
    "path out of the volume": (PATH, "a/../../b", PATH, "remove the '.' and '..' segments"),
    "path with an empty segment": (PATH, "a//b", PATH, "joined by single '/'"),
    "path with odd characters": (PATH, "a/$(id)", PATH, "segments of letters, digits"),
    "path that is empty": (PATH, "", PATH, "such as team/run-1"),
    "path in the monitor's place": (PATH, ".trainsync/x", PATH, "choose another name"),
    "path too long": (PATH, "a" * 256, PATH, "may not be more than 255"),
    "keep no checkpoint": (
        "spec.checkpoint.maxToKeep", 0, "spec.checkpoint.maxToKeep", "greater than or equal to 1"),
    "unknown verification": (
        "spec.checkpoint.verify", "hope", "spec.checkpoint.verify", 'supported values: "size"'),
    "unknown save strategy": (
        "spec.checkpoint.saveStrategy", "one_by_one", "spec.checkpoint.saveStrategy",
        'supported values: "unrestricted", "single_node", "single_process", "single_thread"'),
    "negative restarts": (
        "spec.failurePolicy.maxRestarts", -1, "spec.failurePolicy.maxRestarts",
        "greater than or equal to 0"),
    "a rule for no failure": (
        "spec.failurePolicy.rules", [{"action": "Fail"}], "spec.failurePolicy.rules[0]",
        "say which failures the rule is for"),
    "an expression that may take long": (
        "spec.failurePolicy.rules", [{"action": "Fail", "onMessage": "(a+)+"}],
        "spec.failurePolicy.rules[0].onMessage", "other repetitions are refused"),
    "an expression that is none": (
        "spec.failurePolicy.rules", [{"action": "Fail", "onMessage": "[z-a]"}],
        "spec.failurePolicy.rules[0].onMessage", "regular expression"),
    "unknown restart scope": (
        "spec.failurePolicy.restartScope", "Node", "spec.failurePolicy.restartScope",
        'supported values: "Job", "Cluster"'),
    "monitor asks for nonsense": (
        "spec.monitor.resources", {"requests": {"cpu": "lots"}},
        "spec.monitor.resources", "must be quantities, such as"),
    "field that does not exist": ("spec.chekpoint", {}, "spec.chekpoint", "unknown field"),
    "field that does not exist deep inside": (
        f"{CLUSTER}.groups.0.replica", 2, "spec.clusters[0].groups[0].replica", "unknown field"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_manifest_is_refused_with_the_field_and_the_remedy(
    case: str, module_namespace: Kubectl
) -> None:
    path, value, field, remedy = WRONG[case]
    done = module_namespace.apply(changed(minimal(), path, value), "--dry-run=server")
    assert done.returncode != 0, done.stdout
    assert field in done.stderr
    assert remedy in done.stderr


def test_names_of_servers_of_several_nodes_fit_into_labels_of_their_pods(
    module_namespace: Kubectl,
) -> None:
    large = changed(served("r" * 20), "spec.servers.0.nodes", 2)
    longest = changed(large, "spec.servers.0.name", "s" * 19)
    done = module_namespace.apply(longest, "--dry-run=server")
    assert done.returncode == 0, done.stderr
    longer = changed(longest, "spec.servers.0.name", "s" * 20)
    done = module_namespace.apply(longer, "--dry-run=server")
    assert "may have at most 39 characters together where nodes is above 1" in done.stderr
    one = changed(longer, "spec.servers.0.nodes", 1)
    assert module_namespace.apply(one, "--dry-run=server").returncode == 0


def test_no_servers_have_the_name_of_one_server_of_several_nodes(
    module_namespace: Kubectl,
) -> None:
    both = changed(changed(served(), "spec.servers.0.name", "a"), "spec.servers.1.name", "a-0")
    assert module_namespace.apply(both, "--dry-run=server").returncode == 0
    large = changed(both, "spec.servers.0.nodes", 2)
    done = module_namespace.apply(large, "--dry-run=server")
    assert "because LeaderWorkerSets name each server so" in done.stderr
    other = changed(large, "spec.servers.1.name", "a-0x")
    assert module_namespace.apply(other, "--dry-run=server").returncode == 0


def test_servers_stay_of_one_node_or_of_several(namespace: Kubectl) -> None:
    large = changed(served(), "spec.servers.0.nodes", 2)
    assert namespace.apply(large).returncode == 0
    assert namespace.apply(changed(large, "spec.servers.0.nodes", 3)).returncode == 0
    for path, nodes in (("spec.servers.0.nodes", 1), ("spec.servers.1.nodes", 2)):
        done = namespace.apply(changed(large, path, nodes))
        assert "spec.servers[].nodes cannot change between 1 and more" in done.stderr
        assert "add an entry of another name" in done.stderr
    other = changed(large, "spec.servers.1.name", "jury")
    assert namespace.apply(changed(other, "spec.servers.1.nodes", 2)).returncode == 0


def test_names_of_servers_fit_into_those_of_their_services(module_namespace: Kubectl) -> None:
    longest = changed(served("r" * 30), "spec.servers.0.name", "s" * 25)
    assert module_namespace.apply(longest, "--dry-run=server").returncode == 0
    done = module_namespace.apply(
        changed(longest, "spec.servers.0.name", "s" * 26), "--dry-run=server"
    )
    assert "metadata.name and spec.servers[].name" in done.stderr
    assert "shorten one of the two" in done.stderr


def test_there_are_enough_wrong_manifests() -> None:
    assert len(WRONG) >= 25


# changed field of the accepted full manifest
FROZEN: dict[str, tuple[str, Any, str]] = {
    "checkpoint storage": (CLAIM, {"size": "1Ti"}, "spec.checkpoint.storage is immutable"),
    "checkpoint path": (PATH, "elsewhere", "spec.checkpoint.path is immutable"),
    "checkpoint path removed": (PATH, ..., "spec.checkpoint.path is immutable"),
    "cluster renamed": (f"{CLUSTER}.name", "other", "spec.clusters[].name is immutable"),
    "cluster added": (
        "spec.clusters.1", {**OTHER_CLUSTER, "groups": [{"name": "t", "role": "Explorer"}]},
        "clusters cannot be added"),
    "managed by another": (
        "spec.managedBy", "kueue.x-k8s.io/multikueue", "spec.managedBy is immutable"),
    "group renamed": (f"{CLUSTER}.groups.1.name", "other", "groups[].name and role are immutable"),
    "group removed": (f"{CLUSTER}.groups.1", ..., "groups cannot be added or removed"),
}  # fmt: skip


@pytest.mark.parametrize("case", FROZEN)
def test_what_is_immutable_cannot_be_changed_and_the_message_says_what_to_do(
    case: str, namespace: Kubectl
) -> None:
    path, value, message = FROZEN[case]
    assert namespace.apply(full()).returncode == 0
    done = namespace.apply(changed(full(), path, value))
    assert done.returncode != 0, done.stdout
    assert message in done.stderr
    assert "make a new TrainingRun instead" in done.stderr


def test_trainers_can_be_resized_only_while_the_run_is_suspended(namespace: Kubectl) -> None:
    replicas = f"{CLUSTER}.groups.0.replicas"
    assert namespace.apply(minimal()).returncode == 0
    done = namespace.apply(changed(minimal(), replicas, 3))
    assert "suspend the run first" in done.stderr
    suspended = changed(changed(minimal(), replicas, 3), "spec.suspend", True)
    assert namespace.apply(suspended).returncode == 0


def test_explorers_can_be_resized_at_any_time(namespace: Kubectl) -> None:
    run = changed(minimal(), f"{CLUSTER}.groups.1", EXPLORER)
    assert namespace.apply(run).returncode == 0
    done = namespace.apply(changed(run, f"{CLUSTER}.groups.1.replicas", 5))
    assert done.returncode == 0, done.stderr


def kept_spec(namespace: Kubectl, written: dict[str, Any]) -> dict[str, Any]:
    """The spec of a run as the API server keeps it."""
    done = namespace.apply(written)
    assert done.returncode == 0, done.stderr
    run = namespace.get("trainingrun", written["metadata"]["name"])
    assert run is not None
    spec: dict[str, Any] = run["spec"]
    return spec


def test_a_minimal_manifest_gets_its_defaults(namespace: Kubectl) -> None:
    spec = kept_spec(namespace, minimal())
    assert spec["suspend"] is False
    assert spec["sync"] == {
        "method": "memory",
        "style": "fixed",
        "interval": 1,
        "offset": 0,
        "timeoutSeconds": 600,
        "delta": False,
    }
    assert spec["failurePolicy"] == {
        "maxRestarts": 3,
        "maxInfrastructureRestarts": 100,
        "backoffSeconds": 10,
        "restartScope": "Job",
        "warmSpare": False,
        "podReplacementSeconds": 0,
        "rules": [],
    }
    assert spec["checkpoint"]["interval"] == 100
    assert spec["checkpoint"]["verify"] == "size"
    assert spec["checkpoint"]["saveStrategy"] == "unrestricted"
    assert spec["clusters"][0]["groups"][0]["replicas"] == 1
    assert spec["ttlSecondsAfterFinished"] == 300


def test_a_bucket_needs_its_url_alone_and_neither_moves_nor_becomes_a_volume(
    namespace: Kubectl,
) -> None:
    bucket = changed(minimal(), STORAGE, IN_BUCKET)
    assert namespace.apply(bucket).returncode == 0
    with_keys = changed(bucket, f"{STORAGE}.objectStore.credentials", KEYS)
    assert namespace.apply(with_keys).returncode == 0, "a run may get other credentials"
    for other in (
        {"objectStore": {"url": "s3://bucket/b"}},
        minimal()["spec"]["checkpoint"]["storage"],
    ):
        done = namespace.apply(changed(bucket, STORAGE, other))
        assert "spec.checkpoint.storage is immutable" in done.stderr


def test_explorers_and_servers_may_read_commits_in_a_bucket(namespace: Kubectl) -> None:
    bucket = changed(minimal(), STORAGE, IN_BUCKET)
    with_keys = changed(bucket, f"{STORAGE}.objectStore.readCredentials", KEYS)
    committed = changed(with_keys, "spec.sync", {"method": "checkpoint"})
    alone = {**SERVERS[0], "sync": {"pause": "abort"}}
    done = namespace.apply(changed(committed, "spec.servers", [alone]))
    assert done.returncode == 0, done.stderr


def test_a_run_in_a_bucket_may_keep_shards_in_memory_and_go_back(namespace: Kubectl) -> None:
    bucket = changed(minimal(), STORAGE, IN_BUCKET)
    memory = changed(bucket, "spec.checkpoint.memory", {"budget": "1Gi"})
    done = namespace.apply(changed(memory, "spec.resumeFrom", {"step": 1}))
    assert done.returncode == 0, done.stderr


def test_memory_that_is_not_enabled_asks_for_no_neighbour(namespace: Kubectl) -> None:
    memory = {"enabled": False, "budget": "1Gi", "copies": 1}
    done = namespace.apply(changed(minimal(), "spec.checkpoint.memory", memory))
    assert done.returncode == 0, done.stderr


def test_a_claim_template_asks_for_many_writers_by_default(namespace: Kubectl) -> None:
    storage = {"volumeClaimTemplate": {"size": "1Gi"}}
    spec = kept_spec(namespace, changed(minimal(), "spec.checkpoint.storage", storage))
    template = spec["checkpoint"]["storage"]["volumeClaimTemplate"]
    assert template["accessModes"] == ["ReadWriteMany"]


def test_a_full_manifest_is_kept_as_it_was_written(namespace: Kubectl) -> None:
    written, kept = full()["spec"], kept_spec(namespace, full())
    assert kept["clusters"][0]["head"] == written["clusters"][0]["head"]
    assert kept["checkpoint"] == written["checkpoint"]
    assert kept["failurePolicy"] == written["failurePolicy"]
    assert kept["monitor"]["resources"]["requests"] == {"cpu": 1, "memory": "1Gi"}


def test_explorers_that_ray_counts_are_kept_as_they_were_written(namespace: Kubectl) -> None:
    written = autoscaled()
    spec = kept_spec(namespace, written)
    (kept,), (asked,) = spec["clusters"], written["spec"]["clusters"]
    assert kept["groups"][1].items() >= asked["groups"][1].items()
    options = asked["rayClusterOverrides"]["autoscalerOptions"]
    assert kept["rayClusterOverrides"]["autoscalerOptions"] == options


def test_servers_are_kept_as_they_were_written_and_get_their_defaults(namespace: Kubectl) -> None:
    written = served()
    spec = kept_spec(namespace, written)
    rollout, judge = spec["servers"]
    assert rollout == written["spec"]["servers"][0]
    assert (
        judge.items()
        >= {
            "nodes": 1,
            "port": 8000,
            "proof": "IfPresent",
            "sync": {
                "pause": "keep",
                "fellows": False,
                "prepareSeconds": 0,
                "sglangRoute": "disk",
            },
        }.items()
    )
    assert not {"replicas", "maxStaleness"} & judge.keys()


def test_adapters_of_servers_are_kept_as_peft_writes_them(namespace: Kubectl) -> None:
    written = adapted()
    spec = kept_spec(namespace, written)
    for kept, asked in zip(spec["servers"], written["spec"]["servers"], strict=True):
        assert kept["adapter"] == asked["adapter"]


def test_a_store_of_weights_is_kept_as_it_was_written(namespace: Kubectl) -> None:
    written = changed(stored(), "spec.clusters.1", OTHER_CLUSTER)
    spec = kept_spec(namespace, written)
    assert spec["sync"]["store"] == written["spec"]["sync"]["store"]


def test_servers_and_their_fellows_need_no_volume_where_weights_go_through_a_bucket(
    namespace: Kubectl,
) -> None:
    committed = changed(served_by_store("committed"), "spec.sync", {"method": "checkpoint"})
    for written in (served_by_store(), committed):
        (server, *_) = kept_spec(namespace, written)["servers"]
        assert server == written["spec"]["servers"][0]
        assert server["sync"]["fellows"]


def test_the_scale_of_explorers_that_ray_counts_is_refused(namespace: Kubectl) -> None:
    done = namespace.apply(changed(autoscaled(), "spec.explorerReplicas", 2))
    assert done.returncode != 0
    assert "spec.explorerReplicas is not for explorers that Ray's autoscaler counts" in done.stderr


def test_a_template_may_give_the_image_that_its_cluster_does_not(namespace: Kubectl) -> None:
    template = {"spec": {"containers": [{"name": "ray", "image": "registry.example/ray:1"}]}}
    run = changed(minimal(), f"{CLUSTER}.image", ...)
    run = changed(run, f"{CLUSTER}.head", {"template": template})
    run = changed(run, f"{CLUSTER}.groups.0.template", template)
    done = namespace.apply(run)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("method", ["nccl", "checkpoint"])
def test_explorers_may_have_a_cluster_of_their_own(method: str, namespace: Kubectl) -> None:
    run = changed(minimal(), "spec.clusters.1", OTHER_CLUSTER)
    done = namespace.apply(changed(run, "spec.sync.method", method))
    assert done.returncode == 0, done.stderr


def test_kubectl_shows_the_columns_and_knows_the_short_name(namespace: Kubectl) -> None:
    assert namespace.apply(minimal()).returncode == 0
    narrow = namespace("get", "tr").splitlines()[0].split()
    assert narrow == [
        "NAME", "PHASE", "STEP", "TOTAL", "CHECKPOINT", "WEIGHTS", "LAG", "RESTARTS",
        "PROBLEM", "AGE",
    ]  # fmt: skip
    wide = namespace("get", "tr", "-o", "wide").splitlines()[0].split()
    assert {"CLUSTERS", "SERVERS", "MONITOR", "MESSAGE"} <= set(wide)
