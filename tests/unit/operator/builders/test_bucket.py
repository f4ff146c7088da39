"""A run in a bucket, and a mirror: who is told the place, and who has keys."""

from typing import Any

import pytest
from trainsync.api.bucket import CREDENTIALS
from trainsync_operator.builders import (
    fingerprint,
    pvc,
)

from tests.unit.operator.builders.built import (
    built_cluster,
    env_of,
    in_bucket,
    monitor_pod,
    target,
    trainer_pod,
)
from tests.unit.operator.support import make_run, spec


def test_the_monitor_alone_has_the_mirror_and_names_keys_of_its_secret() -> None:
    mirror = {
        "url": "s3://bucket/run",
        "endpoint": "https://s3.example.com",
        "keepEvery": 100,
        "uploadBytesPerSecond": "50Mi",
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
    assert variables["TRAINSYNC_MIRROR_UPLOAD_BYTES_PER_SECOND"] == "50Mi"
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


def test_those_that_save_alone_are_told_how_fast_they_may() -> None:
    chosen = in_bucket(uploadBytesPerSecond="200Mi")
    groups = make_run(chosen).spec.clusters[0].groups
    workers = built_cluster(chosen)["spec"]["workerGroupSpecs"]
    found = {}
    for group, worker in zip(groups, workers, strict=True):
        entries = worker["template"]["spec"]["containers"][0]["env"]
        found[group.role.value] = [e["value"] for e in entries if "BYTES_PER_SECOND" in e["name"]]
    assert found == {"Trainer": ["200Mi"], "Explorer": []}
    assert not [name for name in env_of(trainer_pod(built_cluster(in_bucket()))) if "BYTES" in name]


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
