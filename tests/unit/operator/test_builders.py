"""The children built for a run."""

import copy
import json
from typing import Any

import pytest
import yaml
from trainsync.api import names
from trainsync.api.bucket import CREDENTIALS
from trainsync.api.env import (
    ATTEMPT,
    CHECKPOINT_DIR,
    CHECKPOINT_INCREMENTAL,
    CHECKPOINT_MAX_TO_KEEP,
    CHECKPOINT_MEMORY,
    CHECKPOINT_MEMORY_COPIES,
    CHECKPOINT_MEMORY_DIR,
    CHECKPOINT_SAVE_STRATEGY,
    MONITOR_URL,
    NODE_NAME,
    SYNC_BUCKET_SIZE,
    SYNC_DELTA,
    TRAINER_CLUSTER,
)
from trainsync_operator.builders import (
    fingerprint,
    monitor_deployment,
    monitor_image,
    monitor_rbac,
    pvc,
    raycluster,
    rayjob,
    service,
)
from trainsync_operator.builders.target import MonitorSettings, Target
from trainsync_operator.kube.kinds import CLUSTER_ROLE, ROLE
from trainsync_operator.rbac import MONITOR_RULES, RUN_RULES, bind_rule
from trainsync_operator.reconcile.run import PRIORITY_LABEL, QUEUE_LABEL, SpecError, parse

from tests.unit.operator.support import UID, make_run, raw_run, spec


def target(run_spec: dict[str, Any] | None = None, **arguments: Any) -> Target:
    return Target(make_run(run_spec, **arguments), 7, 5, MonitorSettings("monitor:1"))


def built_cluster(run_spec: dict[str, Any] | None = None, **arguments: Any) -> dict[str, Any]:
    chosen = target(run_spec, **arguments)
    return raycluster.build(chosen, chosen.run.spec.clusters[0])


def built_job(run_spec: dict[str, Any] | None = None) -> dict[str, Any]:
    chosen = target(run_spec)
    return rayjob.build(chosen, chosen.run.spec.clusters[0], "uid-ray")


def with_cluster(**changes: Any) -> dict[str, Any]:
    changed = spec()
    changed["clusters"][0].update(changes)
    return changed


def trainer_pod(cluster: dict[str, Any]) -> dict[str, Any]:
    pod: dict[str, Any] = cluster["spec"]["workerGroupSpecs"][0]["template"]["spec"]
    return pod


def monitor_pod(chosen: dict[str, Any]) -> dict[str, Any]:
    pod: dict[str, Any] = monitor_deployment.build(target(chosen))["spec"]["template"]["spec"]
    return pod


def env_of(pod: dict[str, Any]) -> dict[str, str]:
    return {e["name"]: e["value"] for e in pod["containers"][0]["env"] if "value" in e}


def test_clusters_are_named_after_the_cluster_attempt_and_jobs_after_the_attempt() -> None:
    assert built_cluster()["metadata"]["name"] == "tiny-main-5"
    job = built_job()
    assert job["metadata"]["name"] == "tiny-main-7"
    assert job["spec"]["clusterSelector"] == {"ray.io/cluster": "tiny-main-5"}


def test_names_at_the_limit_fit_into_what_kuberay_allows() -> None:
    longest = parse(raw_run(with_cluster(name="c" * 20), name="r" * 22))
    chosen = Target(longest, 999, 999, MonitorSettings("m"))
    for obj in (
        rayjob.build(chosen, longest.spec.clusters[0], "uid-ray"),
        raycluster.build(chosen, longest.spec.clusters[0]),
    ):
        assert len(obj["metadata"]["name"]) <= 47


def test_every_group_has_exactly_its_replicas_and_its_roles_resource() -> None:
    trainer, explorer = built_cluster()["spec"]["workerGroupSpecs"]
    assert trainer["replicas"] == trainer["minReplicas"] == trainer["maxReplicas"] == 2
    for group, resource in ((trainer, "trainsync-trainer"), (explorer, "trainsync-explorer")):
        quoted = group["rayStartParams"]["resources"]
        assert json.loads(json.loads(quoted)) == {resource: 1}


@pytest.mark.parametrize("given", ['"{\\"gpu\\": 2}"', '{"gpu": 2}', "'{\"gpu\": 2}'"])
def test_resources_that_the_user_gave_are_kept(given: str) -> None:
    changed = spec()
    changed["clusters"][0]["groups"][0]["rayStartParams"] = {"resources": given, "num-cpus": "3"}
    params = built_cluster(changed)["spec"]["workerGroupSpecs"][0]["rayStartParams"]
    assert json.loads(json.loads(params["resources"])) == {"gpu": 2, "trainsync-trainer": 1}
    assert params["num-cpus"] == "3"


@pytest.mark.parametrize("given", ["{gpu: 2", "[1]", "7"])
def test_resources_that_are_no_mapping_are_refused_with_the_field(given: str) -> None:
    changed = spec()
    changed["clusters"][0]["groups"][0]["rayStartParams"] = {"resources": given}
    with pytest.raises(SpecError, match=r"groups\[trainer\].rayStartParams.resources"):
        built_cluster(changed)


def test_the_head_has_no_cpus_unless_the_user_says_so() -> None:
    assert built_cluster()["spec"]["headGroupSpec"]["rayStartParams"] == {"num-cpus": "0"}
    given = built_cluster(with_cluster(head={"rayStartParams": {"num-cpus": "2"}}))
    assert given["spec"]["headGroupSpec"]["rayStartParams"] == {"num-cpus": "2"}


def test_a_templates_own_period_of_ray_is_kept() -> None:
    own = {"name": "RAY_free_objects_period_milliseconds", "value": "500"}
    changed = spec()
    changed["clusters"][0]["groups"][0]["template"] = {
        "spec": {"containers": [{"name": "ray-worker", "env": [own]}]}
    }
    assert env_of(trainer_pod(built_cluster(changed)))[own["name"]] == "500"


def test_all_attempts_are_one_run_of_a_tracker_unless_the_template_says_otherwise() -> None:
    names = ("WANDB_RUN_ID", "WANDB_NAME", "WANDB_RESUME")
    environment = env_of(trainer_pod(built_cluster()))
    assert [environment[name] for name in names] == [UID, "tiny", "allow"]
    changed = spec()
    own = {"name": "WANDB_RUN_ID", "value": "mine"}
    changed["clusters"][0]["groups"][0]["template"] = {
        "spec": {"containers": [{"name": "ray-worker", "env": [own]}]}
    }
    assert env_of(trainer_pod(built_cluster(changed)))["WANDB_RUN_ID"] == "mine"


def test_a_pod_is_told_the_size_of_buckets_as_it_was_written() -> None:
    assert SYNC_BUCKET_SIZE not in env_of(trainer_pod(built_cluster()))
    chosen = spec(sync={"method": "nccl", "bucketSize": "64Mi"})
    assert env_of(trainer_pod(built_cluster(chosen)))[SYNC_BUCKET_SIZE] == "64Mi"


def test_trainers_keep_shards_in_a_memory_of_their_own_and_explorers_have_none() -> None:
    assert CHECKPOINT_MEMORY not in env_of(trainer_pod(built_cluster()))
    chosen = spec(checkpoint={**spec()["checkpoint"], "memory": {"budget": "2Ti"}})
    cluster = built_cluster(chosen)
    head = cluster["spec"]["headGroupSpec"]["template"]["spec"]
    volume = {"name": "trainsync-kept", "emptyDir": {"medium": "Memory", "sizeLimit": "2Ti"}}
    for pod in (trainer_pod(cluster), head):  # the driver's settings are those of its actors
        assert env_of(pod)[CHECKPOINT_MEMORY] == "2Ti"
        mount = {"name": "trainsync-kept", "mountPath": env_of(pod)[CHECKPOINT_MEMORY_DIR]}
        assert mount in pod["containers"][0]["volumeMounts"]
        assert volume in pod["volumes"]
    explorer = cluster["spec"]["workerGroupSpecs"][1]["template"]["spec"]
    assert CHECKPOINT_MEMORY not in env_of(explorer)
    assert volume not in explorer["volumes"]


def test_trainers_of_a_run_in_a_bucket_keep_shards_in_memory_too() -> None:
    chosen = in_bucket()
    chosen["checkpoint"]["memory"] = {"budget": "2Ti", "copies": 1}
    pod = trainer_pod(built_cluster(chosen))
    assert env_of(pod)["TRAINSYNC_CHECKPOINT_DIR"] == "s3://bucket/run"
    assert env_of(pod)[CHECKPOINT_MEMORY] == "2Ti"
    assert env_of(pod)[CHECKPOINT_MEMORY_COPIES] == "1"
    volume = {"name": "trainsync-kept", "emptyDir": {"medium": "Memory", "sizeLimit": "2Ti"}}
    assert volume in pod["volumes"]


def test_trainers_are_told_of_copies_where_the_run_has_some() -> None:
    def told(memory: dict[str, Any]) -> str | None:
        chosen = spec(checkpoint={**spec()["checkpoint"], "memory": memory})
        return env_of(trainer_pod(built_cluster(chosen))).get(CHECKPOINT_MEMORY_COPIES)

    assert told({"budget": "2Ti", "copies": 1}) == "1"
    assert told({"budget": "2Ti", "copies": 0}) is told({"budget": "2Ti"}) is None


def test_the_monitor_alone_has_the_mirror_and_names_keys_of_its_secret() -> None:
    mirror = {
        "url": "s3://bucket/run",
        "endpoint": "https://s3.example.com",
        "keepEvery": 100,
        "credentials": {"secretRef": {"name": "bucket-keys"}},
    }
    chosen = spec(checkpoint={**spec()["checkpoint"], "mirror": mirror})
    container = monitor_pod(chosen)["containers"][0]
    variables = {entry["name"]: entry.get("value") for entry in container["env"]}
    assert variables["TRAINSYNC_MIRROR_URL"] == "s3://bucket/run"
    assert variables["TRAINSYNC_MIRROR_ENDPOINT"] == "https://s3.example.com"
    assert (variables["TRAINSYNC_MIRROR_KEEP_LAST"], variables["TRAINSYNC_MIRROR_KEEP_EVERY"]) == (
        "3",
        "100",
    )
    assert "TRAINSYNC_MIRROR_ALLOW_HTTP" not in variables
    keys = [entry["valueFrom"] for entry in container["env"] if entry["name"].startswith("AWS")]
    assert [key["secretKeyRef"]["key"] for key in keys] == list(CREDENTIALS["s3"])
    assert all(
        key["secretKeyRef"]["name"] == "bucket-keys" and key["secretKeyRef"]["optional"]
        for key in keys
    )
    assert "TRAINSYNC_MIRROR_URL" not in env_of(trainer_pod(built_cluster(chosen)))


def test_without_credentials_a_mirror_has_the_identity_of_the_monitor() -> None:
    chosen = spec(checkpoint={**spec()["checkpoint"], "mirror": {"url": "gs://bucket/run"}})
    names = [entry["name"] for entry in monitor_pod(chosen)["containers"][0]["env"]]
    assert "TRAINSYNC_MIRROR_URL" in names
    assert not set(names) & {key for keys in CREDENTIALS.values() for key in keys}


def in_bucket(**more: Any) -> dict[str, Any]:
    """A spec whose checkpoints are in a bucket."""
    store = {"url": "s3://bucket/run", **more}
    return spec(checkpoint={"storage": {"objectStore": store}})


def test_a_run_in_a_bucket_has_no_volume_and_every_pod_is_told_the_place() -> None:
    chosen = in_bucket(endpoint="http://s3:7070", region="eu", allowHttp=True)
    assert pvc.build(target(chosen)) is None
    cluster = built_cluster(chosen)
    workers = [group["template"]["spec"] for group in cluster["spec"]["workerGroupSpecs"]]
    head = cluster["spec"]["headGroupSpec"]["template"]["spec"]
    for pod in (monitor_pod(chosen), head, *workers):
        variables = {entry["name"]: entry.get("value") for entry in pod["containers"][0]["env"]}
        assert variables["TRAINSYNC_CHECKPOINT_DIR"] == "s3://bucket/run"
        assert variables["TRAINSYNC_STORE_ENDPOINT"] == "http://s3:7070"
        assert variables["TRAINSYNC_STORE_REGION"] == "eu"
        assert variables["TRAINSYNC_STORE_ALLOW_HTTP"] == "true"
        assert not [volume for volume in pod["volumes"] if "persistentVolumeClaim" in volume]
        mounts = {mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
        assert "/trainsync/checkpoints" not in mounts
    assert "TRAINSYNC_STORE_ENDPOINT" not in env_of(trainer_pod(built_cluster()))


def test_explorers_get_no_keys_of_the_bucket_of_checkpoints() -> None:
    chosen = in_bucket(credentials={"secretRef": {"name": "bucket-keys"}})
    groups = make_run(chosen).spec.clusters[0].groups
    workers = built_cluster(chosen)["spec"]["workerGroupSpecs"]
    found = {}
    for group, worker in zip(groups, workers, strict=True):
        entries = worker["template"]["spec"]["containers"][0]["env"]
        found[group.role.value] = [e["name"] for e in entries if "STORE_AWS" in e["name"]]
    assert found["Explorer"] == []
    assert len(found["Trainer"]) == len(CREDENTIALS["s3"])


@pytest.mark.parametrize("given", [{}, {"readCredentials": {"secretRef": {"name": "reader"}}}])
def test_explorers_that_read_commits_get_the_keys_to_read_the_bucket(given: dict[str, Any]) -> None:
    chosen = in_bucket(credentials={"secretRef": {"name": "writer"}}, **given)
    chosen["sync"] = {"method": "checkpoint", "timeoutSeconds": 70}
    groups = make_run(chosen).spec.clusters[0].groups
    workers = built_cluster(chosen)["spec"]["workerGroupSpecs"]
    found = {}
    for group, worker in zip(groups, workers, strict=True):
        entries = worker["template"]["spec"]["containers"][0]["env"]
        keys = [e["valueFrom"]["secretKeyRef"] for e in entries if "STORE_AWS" in e["name"]]
        found[group.role.value] = {key["name"] for key in keys}
    assert found == {"Trainer": {"writer"}, "Explorer": {"reader" if given else "writer"}}
    (variable,) = (
        entry["value"]
        for entry in monitor_pod(chosen)["containers"][0]["env"]
        if entry["name"] == "TRAINSYNC_SYNC_TIMEOUT_SECONDS"
    )
    assert variable == "70", "how long a state dict is left to its readers"


def test_keys_of_the_buckets_secret_are_named_and_never_written_into_a_pod() -> None:
    chosen = in_bucket(credentials={"secretRef": {"name": "bucket-keys"}})
    for pod in (monitor_pod(chosen), trainer_pod(built_cluster(chosen))):
        keys = [e for e in pod["containers"][0]["env"] if "TRAINSYNC_STORE_AWS" in e["name"]]
        assert [key["name"].removeprefix("TRAINSYNC_STORE_") for key in keys] == list(
            CREDENTIALS["s3"]
        )
        references = [key["valueFrom"]["secretKeyRef"] for key in keys]
        assert [one["key"] for one in references] == list(CREDENTIALS["s3"])
        assert all(one["name"] == "bucket-keys" and one["optional"] for one in references)
        assert not any("value" in key for key in keys)


def test_the_bucket_is_of_what_pods_are_made_from_and_claims_are_as_before() -> None:
    def made(chosen: dict[str, Any]) -> str:
        run = make_run(chosen)
        return fingerprint.of_pods(run.spec, run.spec.clusters[0])

    assert fingerprint.edited(made(in_bucket()), made(in_bucket(region="eu"))) == [
        "spec.checkpoint.storage.objectStore"
    ]
    assert "objectStore" not in made(spec())


def test_memory_of_checkpoints_is_an_edit_of_the_pods_and_a_mirror_is_none() -> None:
    def made(**checkpoint: Any) -> str:
        run = make_run(spec(checkpoint={**spec()["checkpoint"], **checkpoint}))
        return fingerprint.of_pods(run.spec, run.spec.clusters[0])

    assert made() == made(mirror={"url": "s3://bucket/run"}, maxToKeep=2)
    assert made() != made(memory={"budget": "1Gi"})


def test_a_pod_has_its_identity_and_checkpoint_directory() -> None:
    variables = env_of(trainer_pod(built_cluster()))
    assert variables[ATTEMPT] == "5", "a pod carries the attempt that made its cluster"
    assert variables[MONITOR_URL] == "http://tiny-monitor.team.svc:8080"
    assert variables[CHECKPOINT_DIR] == "/trainsync/checkpoints/tiny"
    assert CHECKPOINT_MAX_TO_KEEP not in variables
    storage = spec()["checkpoint"]
    custom = spec(checkpoint={**storage, "path": "a/b", "maxToKeep": 3})
    assert variables[CHECKPOINT_SAVE_STRATEGY] == "unrestricted"
    custom["checkpoint"]["saveStrategy"] = "single_node"
    pod = trainer_pod(built_cluster(custom))
    variables = env_of(pod)
    assert variables[CHECKPOINT_SAVE_STRATEGY] == "single_node"
    node = {"fieldRef": {"apiVersion": "v1", "fieldPath": "spec.nodeName"}}
    assert {"name": NODE_NAME, "valueFrom": node} in pod["containers"][0]["env"]
    assert variables[CHECKPOINT_DIR] == "/trainsync/checkpoints/a/b"
    assert variables[CHECKPOINT_MAX_TO_KEEP] == "3"


def test_pods_know_the_trainers_cluster_where_explorers_are_in_another_one() -> None:
    together = spec()
    main = together["clusters"][0]
    trainers, explorers = main["groups"]
    far = {**main, "name": "far", "groups": [explorers]}
    apart = spec(clusters=[{**main, "groups": [trainers]}, far])
    assert TRAINER_CLUSTER not in env_of(trainer_pod(built_cluster(together)))
    chosen = target(apart)
    for cluster in chosen.run.spec.clusters:
        pod = trainer_pod(raycluster.build(chosen, cluster))
        assert env_of(pod)[TRAINER_CLUSTER] == "main"


def test_deltas_are_asked_of_the_pods_only_when_the_run_wants_them() -> None:
    wanted = spec() | {"sync": {"method": "nccl", "delta": True}}
    assert env_of(trainer_pod(built_cluster(wanted)))[SYNC_DELTA] == "true"
    assert SYNC_DELTA not in env_of(trainer_pod(built_cluster()))


def test_incremental_saves_are_asked_of_the_pods_and_an_edit_of_that_is_seen() -> None:
    wanted = spec()
    storage = {"objectStore": {"url": "s3://bucket/run"}}
    wanted["checkpoint"] = {"storage": storage}
    plain = built_cluster(wanted)
    assert CHECKPOINT_INCREMENTAL not in env_of(trainer_pod(plain))
    older = fingerprint.of_pods(target(wanted).run.spec, target(wanted).run.spec.clusters[0])
    wanted["checkpoint"] = {"storage": storage | {"incremental": True}}
    assert env_of(trainer_pod(built_cluster(wanted)))[CHECKPOINT_INCREMENTAL] == "true"
    newer = fingerprint.of_pods(target(wanted).run.spec, target(wanted).run.spec.clusters[0])
    assert fingerprint.edited(older, newer) == ["spec.checkpoint"]
    assert fingerprint.edited(newer, older) == ["spec.checkpoint"]


def test_the_token_is_for_this_run_and_this_generation_of_pods() -> None:
    volumes = {v["name"]: v for v in trainer_pod(built_cluster())["volumes"]}
    (source,) = volumes["trainsync-token"]["projected"]["sources"]
    assert source["serviceAccountToken"]["audience"] == f"trainsync.dev/run/{UID}/5"
    assert volumes["trainsync-checkpoints"]["persistentVolumeClaim"] == {"claimName": "data"}


def test_pods_are_not_restarted_and_share_the_volume_by_group() -> None:
    pod = trainer_pod(built_cluster())
    assert pod["restartPolicy"] == "Never"
    assert pod["securityContext"] == {"fsGroup": 65532, "supplementalGroups": [65532]}


NODE_LOST = [
    {
        "key": f"node.kubernetes.io/{state}",
        "operator": "Exists",
        "effect": "NoExecute",
        "tolerationSeconds": 30,
    }
    for state in ("not-ready", "unreachable")
]
OWN = {"key": "node.kubernetes.io/not-ready", "operator": "Exists", "tolerationSeconds": 600}
GPU = {"key": "nvidia.com/gpu", "operator": "Exists"}


@pytest.mark.parametrize(
    ("given", "built"),
    [
        (None, NODE_LOST),
        ([GPU], [GPU, *NODE_LOST]),
        ([OWN], [OWN, NODE_LOST[1]]),
        ([{"operator": "Exists"}], [{"operator": "Exists"}]),  # of all taints
        ([{**OWN, "effect": "NoSchedule"}], [{**OWN, "effect": "NoSchedule"}, *NODE_LOST]),
    ],
)
def test_pods_leave_a_lost_node_after_30_s_unless_their_template_says_otherwise(
    given: list[dict[str, Any]] | None, built: list[dict[str, Any]]
) -> None:
    changed = spec()
    if given is not None:
        changed["clusters"][0]["groups"][0]["template"] = {"spec": {"tolerations": given}}
    assert trainer_pod(built_cluster(changed))["tolerations"] == built


def test_a_users_template_is_kept_and_gives_way_only_where_names_clash() -> None:
    template = {
        "metadata": {"labels": {"team": "x", names.LABEL_RUN: "forged"}},
        "spec": {
            "restartPolicy": "Always",
            "securityContext": {"fsGroup": 1, "runAsUser": 2},
            "nodeSelector": {"gpu": "h200"},
            "containers": [
                {
                    "name": "ray",
                    "image": "own:1",
                    "env": [{"name": "A", "value": "1"}, {"name": ATTEMPT, "value": "99"}],
                    "volumeMounts": [{"name": "v", "mountPath": "/v"}],
                },
                {"name": "side", "image": "side:1"},
            ],
            "volumes": [{"name": "v", "emptyDir": {}}],
        },
    }
    changed = spec()
    changed["clusters"][0]["groups"][0]["template"] = template
    built = built_cluster(changed)["spec"]["workerGroupSpecs"][0]["template"]
    pod, labels = built["spec"], built["metadata"]["labels"]
    assert labels["team"] == "x"
    assert labels[names.LABEL_RUN] == "tiny"
    assert pod["nodeSelector"] == {"gpu": "h200"}
    assert pod["restartPolicy"] == "Never"
    assert pod["securityContext"] == {
        "fsGroup": 1,
        "runAsUser": 2,
        "supplementalGroups": [65532],
    }
    ray, side = pod["containers"]
    assert ray["image"] == "own:1"
    assert [e["value"] for e in ray["env"] if e["name"] == ATTEMPT] == ["5"]
    assert {"name": "RAY_free_objects_period_milliseconds", "value": "10"} in ray["env"]
    assert {"name": "A", "value": "1"} in ray["env"]
    assert {"name": "v", "mountPath": "/v"} in ray["volumeMounts"]
    assert side == {"name": "side", "image": "side:1"}
    assert changed["clusters"][0]["groups"][0]["template"] == template, "the spec is not touched"


def test_the_clusters_image_serves_where_a_template_has_none() -> None:
    assert trainer_pod(built_cluster())["containers"][0]["image"] == "ray:1"


def test_the_job_carries_its_attempt_over_that_of_the_pods_and_keeps_the_users_environment() -> (
    None
):
    given = f"working_dir: /app\nenv_vars: {{A: '1', {ATTEMPT}: '99'}}"
    runtime = yaml.safe_load(
        built_job(with_cluster(runtimeEnvYAML=given))["spec"]["runtimeEnvYAML"]
    )
    assert runtime == {"working_dir": "/app", "env_vars": {"A": "1", ATTEMPT: "7"}}
    assert yaml.safe_load(built_job()["spec"]["runtimeEnvYAML"]) == {"env_vars": {ATTEMPT: "7"}}


@pytest.mark.parametrize("given", ["- a", "env_vars: 3", "a: [", "a: b: c", "a: 2026-13-45"])
def test_a_runtime_environment_that_cannot_be_read_is_refused_with_the_field(given: str) -> None:
    with pytest.raises(SpecError, match=r"spec.clusters\[main\].runtimeEnvYAML"):
        built_job(with_cluster(runtimeEnvYAML=given))


@pytest.mark.parametrize(
    ("given", "place"),
    [
        ("env_vars:\n  KEY: sk-secret: x", "line 2, column 17"),
        ("env_vars:\n  KEY: *sk-secret", "line 2, column 8"),
        ("env_vars:\n  KEY: !sk-secret x", "line 2, column 8"),
        ("a: [sk-secret", "line 1, column 14"),
    ],
)
def test_a_runtime_environment_that_is_no_yaml_is_not_quoted(given: str, place: str) -> None:
    with pytest.raises(SpecError) as refused:
        built_job(with_cluster(runtimeEnvYAML=given))
    assert "secret" not in str(refused.value)
    assert place in str(refused.value)
    assert refused.value.__cause__ is None
    assert refused.value.__suppress_context__


def test_the_controller_of_a_job_is_its_ray_cluster_and_the_run_owns_it_too() -> None:
    run, ray = built_job()["metadata"]["ownerReferences"]
    assert (run["kind"], run["uid"], run.get("controller")) == ("TrainingRun", UID, None)
    assert ray["controller"]
    assert (ray["kind"], ray["name"], ray["uid"]) == ("RayCluster", "tiny-main-5", "uid-ray")


def test_jobs_are_never_retried_by_kuberay() -> None:
    job = built_job()["spec"]
    assert job["backoffLimit"] == 0
    assert job["submissionMode"] == "HTTPMode"
    assert job["jobId"] == "tiny-main-7"


def test_the_queue_of_the_run_is_that_of_its_clusters_and_suspend_is_left_to_the_queue() -> None:
    queued = built_cluster(labels={QUEUE_LABEL: "gpus"})
    assert queued["metadata"]["labels"][QUEUE_LABEL] == "gpus"
    for cluster in (queued, built_cluster()):
        assert "suspend" not in cluster["spec"]


def test_the_priority_and_the_topology_of_the_queue_are_passed_on() -> None:
    topology = {"kueue.x-k8s.io/podset-required-topology": "cloud.example/block"}
    template = {"metadata": {"annotations": topology}}
    groups = [{"name": "trainer", "role": "Trainer", "replicas": 2, "template": template}]
    labels = {QUEUE_LABEL: "gpus", PRIORITY_LABEL: "research"}
    cluster = built_cluster(with_cluster(groups=groups), labels=labels)
    assert cluster["metadata"]["labels"][PRIORITY_LABEL] == "research"
    (workers,) = cluster["spec"]["workerGroupSpecs"]
    assert workers["template"]["metadata"]["annotations"] == topology


def test_pods_of_a_queue_outlive_their_preemption_until_the_save_and_others_do_not() -> None:
    def head(seconds: int, pod: dict[str, Any] | None = None, **labels: str) -> dict[str, Any]:
        run_spec = with_cluster(head={"template": {"spec": pod or {}}})
        run_spec["suspendPolicy"] = {"saveDeadlineSeconds": seconds}
        cluster = built_cluster(run_spec, labels=labels)
        found: dict[str, Any] = cluster["spec"]["headGroupSpec"]["template"]["spec"]
        return found

    queue = {QUEUE_LABEL: "gpus"}
    for free in (head(60), head(0, **queue)):
        assert "terminationGracePeriodSeconds" not in free
        assert "lifecycle" not in free["containers"][0]
    held = head(60, {"terminationGracePeriodSeconds": 5}, **queue)
    assert held["terminationGracePeriodSeconds"] == 65
    command = held["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert command == ["python3", "-m", "trainsync.runtime.stop.hook", "60"]
    own = {"preStop": {"sleep": {"seconds": 9}}}
    theirs = head(60, {"containers": [{"name": "ray", "lifecycle": own}]}, **queue)
    assert theirs["containers"][0]["lifecycle"] == own
    assert theirs["terminationGracePeriodSeconds"] == 90


def test_the_hash_changes_with_what_is_built_and_only_then() -> None:
    def digest(run_spec: dict[str, Any]) -> str:
        found: str = built_cluster(run_spec)["metadata"]["annotations"][names.ANNOTATION_HASH]
        return found

    assert digest(spec()) == digest(spec())
    assert digest(spec()) != digest(with_cluster(image="ray:2"))


def test_a_claim_that_is_there_keeps_its_spec_and_its_hash() -> None:
    wanted = target(spec(checkpoint={"storage": {"volumeClaimTemplate": {"size": "5Gi"}}}))
    grown = {"resources": {"requests": {"storage": "9Gi"}}, "accessModes": ["ReadWriteMany"]}
    claim = pvc.build(wanted, {"spec": {**grown, "volumeName": "pv-1"}})
    fresh = pvc.build(wanted)
    assert claim is not None
    assert fresh is not None
    assert claim["spec"] == grown
    assert claim["metadata"] == fresh["metadata"], "nothing to apply"


def test_a_claim_is_made_from_the_template_and_none_for_an_existing_one() -> None:
    assert pvc.build(target()) is None
    template = {"size": "5Gi", "storageClassName": "fast"}
    claim = pvc.build(target(spec(checkpoint={"storage": {"volumeClaimTemplate": template}})))
    assert claim is not None
    assert claim["metadata"]["name"] == "tiny-checkpoints"
    assert claim["spec"] == {
        "accessModes": ["ReadWriteMany"],
        "resources": {"requests": {"storage": "5Gi"}},
        "storageClassName": "fast",
    }


def test_a_claim_has_no_owner_unless_it_is_to_be_deleted_with_the_run() -> None:
    def claim(**more: str) -> dict[str, Any]:
        template = {"size": "5Gi", **more}
        made = pvc.build(target(spec(checkpoint={"storage": {"volumeClaimTemplate": template}})))
        assert made is not None
        metadata: dict[str, Any] = made["metadata"]
        return metadata

    kept, deleted = claim(), claim(retentionPolicy="Delete")
    assert "ownerReferences" not in kept
    assert [owner["uid"] for owner in deleted["ownerReferences"]] == [UID]
    assert kept["annotations"] != deleted["annotations"], "a change is applied"


def test_the_monitor_is_one_locked_down_pod() -> None:
    deployment = monitor_deployment.build(target())
    assert deployment["spec"]["replicas"] == 1
    assert deployment["spec"]["strategy"] == {"type": "Recreate"}
    pod = deployment["spec"]["template"]["spec"]
    security = pod["securityContext"]
    assert (security["runAsNonRoot"], security["runAsUser"]) == (True, 65532)
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    (container,) = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["image"] == "monitor:1"


def test_a_runs_own_monitor_image_and_resources_win() -> None:
    monitor = {"image": "own:1", "resources": {"requests": {"cpu": 1}, "limits": {}}}
    pod = monitor_deployment.build(target(spec(monitor=monitor)))["spec"]["template"]["spec"]
    assert pod["containers"][0]["image"] == "own:1"
    assert pod["containers"][0]["resources"] == {"requests": {"cpu": 1}, "limits": {}}


@pytest.mark.parametrize(
    ("image", "name"),
    [
        ("monitor", "monitor"),
        ("registry.example:5000/rl/monitor:1", "registry.example:5000/rl/monitor"),
        ("registry.example:5000/monitor", "registry.example:5000/monitor"),
        ("rl/monitor:1@sha256:00", "rl/monitor"),
    ],
)
def test_an_images_repository_has_neither_tag_nor_digest(image: str, name: str) -> None:
    assert monitor_image.repository(image) == name


@pytest.mark.parametrize(
    ("asked", "allowed", "fine"),
    [
        (None, (), True),
        ("own.example/monitor:2", (), True),
        ("own.example/monitor@sha256:00", (), True),
        ("own.example/monitors:1", (), False),
        ("own.example/monitor/other", (), False),
        ("other.example/rl/monitor:1", (), False),
        ("other.example/rl/monitor:1", ("other.example/rl/monitor",), True),
        ("other.example/rl/monitor:1", ("other.example/rl/",), True),
        ("other.example/rl/monitor:1", ("other.example/rl",), False),
        ("other.example/rl-evil/monitor:1", ("other.example/rl/",), False),
        ("other.example/rl/monitor:1", ("*",), True),
    ],
)
def test_a_monitors_image_comes_from_an_allowed_repository(
    asked: str | None, allowed: tuple[str, ...], fine: bool
) -> None:
    chosen = MonitorSettings("own.example/monitor:1", allowed=allowed)
    refused = monitor_image.why_refused(asked, chosen, running=None)
    assert (refused is None) == fine
    assert monitor_image.why_refused(asked, chosen, running=asked) is None


def test_the_monitor_is_pulled_with_the_secrets_that_the_operator_was_given() -> None:
    without = monitor_deployment.build(target())["spec"]["template"]["spec"]
    assert "imagePullSecrets" not in without
    image = MonitorSettings("registry.example/monitor:1", ("first", "second"))
    built = monitor_deployment.build(Target(make_run(), 7, 5, image))["spec"]["template"]["spec"]
    assert built["imagePullSecrets"] == [{"name": "first"}, {"name": "second"}]


def test_the_service_selects_the_monitors_pod_and_no_other() -> None:
    selector = service.build(target())["spec"]["selector"]
    pod = monitor_deployment.build(target())["spec"]["template"]["metadata"]["labels"]
    assert selector.items() <= pod.items()
    ray = built_cluster()["spec"]["workerGroupSpecs"][0]["template"]["metadata"]["labels"]
    assert not selector.items() <= ray.items()


def test_each_monitor_is_bound_to_the_charts_role_in_its_namespace_alone() -> None:
    binding = monitor_rbac.role_binding(target())
    role = {"kind": "ClusterRole", "name": "trainsync-operator-monitor"}
    assert binding["roleRef"] == {"apiGroup": "rbac.authorization.k8s.io", **role}
    assert binding["metadata"]["namespace"] == "team"
    (subject,) = binding["subjects"]
    assert subject == {"kind": "ServiceAccount", "name": "tiny-monitor", "namespace": "team"}


def test_another_role_has_another_binding_as_a_role_ref_cannot_be_changed() -> None:
    settings = [
        MonitorSettings("m", role=role, role_kind=kind)
        for role in ("one", "two")
        for kind in (ROLE, CLUSTER_ROLE)
    ]
    found = {monitor_rbac.binding_name("tiny", each) for each in settings}
    assert len(found) == 4
    assert "tiny-monitor" not in found  # of releases that made a Role for each run


def test_monitors_write_status_and_leases_and_post_events() -> None:
    rules = {name: set(rule.verbs) for rule in MONITOR_RULES for name in rule.resources}
    assert rules == {
        "trainingruns": {"get"},
        "trainingruns/status": {"patch"},
        "leases": {"create", "get", "update"},
        "events": {"create"},
    }


def test_the_operator_holds_no_lease_and_no_role_of_the_runs_namespaces() -> None:
    held = {name for rule in RUN_RULES for name in rule.resources}
    assert not {"leases", "roles", "clusterroles"} & held
    assert "escalate" not in {verb for rule in RUN_RULES for verb in rule.verbs}
    bind = bind_rule(CLUSTER_ROLE, "x-monitor").to_dict()
    assert (bind["verbs"], bind["resourceNames"]) == (["bind"], ["x-monitor"])


def test_the_operator_has_no_wildcard_no_secrets_and_no_exec() -> None:
    for rule in RUN_RULES:
        assert "*" not in (*rule.verbs, *rule.resources, rule.group)
        assert not {"secrets", "pods/exec"} & set(rule.resources)


def test_containers_that_fail_leave_their_last_lines_in_the_status() -> None:
    own = {"name": "own", "image": "x", "terminationMessagePolicy": "File"}
    template = {"spec": {"containers": [{"name": "ray"}], "initContainers": [{"name": "i"}, own]}}
    changed = spec()
    changed["clusters"][0]["groups"][0]["template"] = template
    pod = trainer_pod(built_cluster(changed))
    first, second = pod["initContainers"]
    for container in (first, pod["containers"][0]):
        assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"
    assert second["terminationMessagePolicy"] == "File"
    monitor = monitor_deployment.build(target())["spec"]["template"]["spec"]["containers"][0]
    assert monitor["terminationMessagePolicy"] == "FallbackToLogsOnError"


def test_scaled_explorers_have_the_runs_count_and_are_no_edit_of_the_pods() -> None:
    run, scaled = make_run(), make_run(spec(explorerReplicas=5))
    groups = built_cluster(spec(explorerReplicas=5))["spec"]["workerGroupSpecs"]
    counts = {group["groupName"]: group["replicas"] for group in groups}
    assert counts == {"trainer": 2, "explorer": 5}
    assert [group["maxReplicas"] for group in groups] == [2, 5]
    before, after = (fingerprint.of_pods(r.spec, r.spec.clusters[0]) for r in (run, scaled))
    assert before == after


def test_labels_for_batch_schedulers_go_on_to_the_ray_cluster_and_no_others() -> None:
    wanted = {"ray.io/gang-scheduling-enabled": "true", "yunikorn.apache.org/queue": "root.rl"}
    plain, labelled = built_cluster(), built_cluster(labels={**wanted, "team": "rl"})
    added = labelled["metadata"]["labels"].items() - plain["metadata"]["labels"].items()
    assert dict(added) == wanted
    assert plain["metadata"]["annotations"] != labelled["metadata"]["annotations"]
    made_from = names.ANNOTATION_MADE_FROM
    before, after = (ray["metadata"]["annotations"][made_from] for ray in (plain, labelled))
    assert before == after, "pods that run do not change"


def test_what_a_scheduler_reads_in_a_template_reaches_the_pods() -> None:
    metadata = {
        "labels": {"scheduling.x-k8s.io/pod-group": "mine"},
        "annotations": {"scheduling.k8s.io/group-name": "mine"},
    }
    template = {"metadata": metadata, "spec": {"schedulerName": "volcano"}}
    group = {"name": "trainer", "role": "Trainer", "template": template}
    ray = built_cluster(with_cluster(head={"template": template}, groups=[group]))
    for made in (ray["spec"]["headGroupSpec"], *ray["spec"]["workerGroupSpecs"]):
        pod = made["template"]
        assert pod["metadata"]["labels"].items() >= metadata["labels"].items()
        assert pod["metadata"]["annotations"] == metadata["annotations"]
        assert pod["spec"]["schedulerName"] == "volcano"


AUTOSCALED = {
    "rayClusterOverrides": {
        "enableInTreeAutoscaling": True,
        "autoscalerOptions": {"idleTimeoutSeconds": 30, "version": "v2"},
    },
    "groups": [
        {"name": "trainer", "role": "Trainer", "replicas": 2},
        {
            "name": "explorer",
            "role": "Explorer",
            "replicas": 2,
            "minReplicas": 1,
            "maxReplicas": 4,
        },
    ],
}


def test_overrides_reach_the_ray_cluster_under_kuberays_names() -> None:
    secret = {"valueFrom": {"secretKeyRef": {"name": "redis", "key": "password"}}}
    overrides = {
        "gcsFaultToleranceOptions": {"redisAddress": "redis:6379", "redisPassword": secret},
        "headServiceAnnotations": {"a": "b"},
        "headServiceType": "NodePort",
    }
    ray = built_cluster(with_cluster(rayClusterOverrides=overrides))["spec"]
    assert ray["gcsFaultToleranceOptions"] == overrides["gcsFaultToleranceOptions"]
    assert ray["headServiceAnnotations"] == {"a": "b"}
    assert ray["headGroupSpec"]["serviceType"] == "NodePort"
    assert "headServiceType" not in ray
    assert "autoscalerOptions" not in ray


def test_what_rays_autoscaler_wrote_stays_and_the_trainers_number_is_fixed() -> None:
    chosen = target(with_cluster(**AUTOSCALED))
    cluster = chosen.run.spec.clusters[0]
    fresh = raycluster.build(chosen, cluster)
    assert fresh["spec"]["enableInTreeAutoscaling"] is True
    assert fresh["spec"]["autoscalerOptions"] == {"idleTimeoutSeconds": 30, "version": "v2"}
    bounds = [
        (g["replicas"], g["minReplicas"], g["maxReplicas"])
        for g in fresh["spec"]["workerGroupSpecs"]
    ]
    assert bounds == [(2, 2, 2), (2, 1, 4)]
    live = copy.deepcopy(fresh)
    strategy = {"workersToDelete": ["tiny-main-5-explorer-worker-x"]}
    live["spec"]["workerGroupSpecs"][1] |= {"replicas": 4, "scaleStrategy": strategy}
    live["spec"]["workerGroupSpecs"][0]["replicas"] = 3  # by hand: it is put right
    again = raycluster.build(chosen, cluster, live)
    trainers, explorers = again["spec"]["workerGroupSpecs"]
    assert (explorers["replicas"], explorers["scaleStrategy"]) == (4, strategy)
    assert trainers["replicas"] == 2
    assert again["metadata"] == fresh["metadata"], "nothing to apply"


def test_bounds_of_the_autoscaler_are_no_edit_of_the_pods_and_overrides_are() -> None:
    def made(**changes: Any) -> str:
        run = make_run(with_cluster(**changes))
        return fingerprint.of_pods(run.spec, run.spec.clusters[0])

    wider = copy.deepcopy(AUTOSCALED)
    wider["groups"][1]["maxReplicas"] = 9  # type: ignore[index]
    assert made(**AUTOSCALED) == made(**wider)
    assert made() != made(rayClusterOverrides={"headServiceType": "NodePort"})
