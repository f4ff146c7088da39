"""What the pods of a run are told, and what of their template is fixed."""

from typing import Any

from trainsync.api.env import (
    ATTEMPT,
    CHECKPOINT_DIR,
    CHECKPOINT_INCREMENTAL,
    CHECKPOINT_MAX_TO_KEEP,
    CHECKPOINT_MEMORY,
    CHECKPOINT_MEMORY_COPIES,
    CHECKPOINT_MEMORY_DIR,
    CHECKPOINT_SAVE_STRATEGY,
    FAILURE_DOMAIN,
    MONITOR_URL,
    NODE_NAME,
    SYNC_BUCKET_SIZE,
    SYNC_DELTA,
    TRAINER_CLUSTER,
)
from trainsync_operator.builders import (
    fingerprint,
    raycluster,
)

from tests.unit.operator.builders.built import built_cluster, env_of, in_bucket, target, trainer_pod
from tests.unit.operator.support import UID, make_run, spec


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


def test_memory_that_is_not_enabled_is_as_none() -> None:
    def made(**memory: object) -> dict[str, Any]:
        return built_cluster(spec(checkpoint={**spec()["checkpoint"], **memory}))["spec"]

    off = {"enabled": False, "budget": "2Ti", "copies": 1}
    assert made(memory=off) == made()
    assert made(memory={**off, "enabled": True}) == made(memory={"budget": "2Ti", "copies": 1})


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


def test_copies_know_the_zone_of_their_node_or_what_the_template_says_instead() -> None:
    def told(copies: int, *own: dict[str, str]) -> list[dict[str, Any]]:
        memory = {"budget": "2Ti", "copies": copies}
        chosen = spec(checkpoint={**spec()["checkpoint"], "memory": memory})
        chosen["clusters"][0]["groups"][0]["template"] = {
            "spec": {"containers": [{"name": "ray-worker", "env": list(own)}]}
        }
        environment = trainer_pod(built_cluster(chosen))["containers"][0]["env"]
        return [one for one in environment if one["name"] == FAILURE_DOMAIN]

    path = "metadata.labels['topology.kubernetes.io/zone']"
    field = {"fieldRef": {"apiVersion": "v1", "fieldPath": path}}
    assert told(0) == []
    assert told(1) == [{"name": FAILURE_DOMAIN, "valueFrom": field}]
    rack = {"name": FAILURE_DOMAIN, "value": "rack-7"}
    assert told(1, rack) == [rack]


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
