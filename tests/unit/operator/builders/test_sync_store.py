"""Ray pods of a run whose weights go through a bucket."""

from typing import Any

import pytest
from trainsync_operator.builders import raycluster
from trainsync_operator.builders.target import MonitorSettings, Target

from tests.unit.operator.support import make_run, spec

KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
PLACE = {"url": "s3://bucket/run", "endpoint": "https://s3.example.com", "region": "eu"}
CREDENTIALS = {"secretRef": {"name": "writer"}}
READ_CREDENTIALS = {"secretRef": {"name": "reader"}}


def containers(store: dict[str, Any], *, apart: bool = False) -> dict[str, list[dict[str, Any]]]:
    """The variables of the first container, by cluster and group."""
    chosen = spec(sync={"method": "store", "store": store})
    main = chosen["clusters"][0]
    if apart:
        explorers = [g for g in main["groups"] if g["role"] == "Explorer"]
        main["groups"] = [g for g in main["groups"] if g["role"] == "Trainer"]
        chosen["clusters"].append({**main, "name": "far", "groups": explorers})
    target = Target(make_run(chosen), 7, 5, MonitorSettings("monitor:1"))
    found = {}
    for cluster in target.run.spec.clusters:
        built = raycluster.build(target, cluster)["spec"]
        pods = {"head": built["headGroupSpec"]}
        pods |= {group["groupName"]: group for group in built["workerGroupSpecs"]}
        for name, pod in pods.items():
            variables = pod["template"]["spec"]["containers"][0]["env"]
            found[f"{cluster.name}/{name}"] = variables
    return found


def plain(variables: list[dict[str, Any]]) -> dict[str, str]:
    return {one["name"]: one["value"] for one in variables if "value" in one}


def secrets(variables: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    found = {one["name"]: one.get("valueFrom", {}).get("secretKeyRef") for one in variables}
    return {name: reference for name, reference in found.items() if reference}


def test_every_ray_pod_is_told_where_the_store_is() -> None:
    pods = containers(PLACE, apart=True)
    assert len(pods) == 4
    for variables in pods.values():
        told = {k: v for k, v in plain(variables).items() if "_SYNC_STORE_" in k}
        assert told == {
            "TRAINSYNC_SYNC_STORE_URL": "s3://bucket/run",
            "TRAINSYNC_SYNC_STORE_ENDPOINT": "https://s3.example.com",
            "TRAINSYNC_SYNC_STORE_REGION": "eu",
        }
        assert plain(variables)["TRAINSYNC_SYNC_METHOD"] == "store"
        assert secrets(variables) == {}, "without credentials pods have their own identity"


def test_keys_of_the_secret_come_under_names_that_no_other_code_reads() -> None:
    for variables in containers({**PLACE, "credentials": CREDENTIALS}).values():
        assert secrets(variables) == {
            f"TRAINSYNC_SYNC_STORE_{key}": {"name": "writer", "key": key, "optional": True}
            for key in KEYS
        }


@pytest.mark.parametrize("credentials", [CREDENTIALS, None])
def test_explorers_read_with_credentials_of_their_own(credentials: dict[str, Any] | None) -> None:
    store = {**PLACE, "readCredentials": READ_CREDENTIALS}
    if credentials is not None:
        store["credentials"] = credentials
    names = {
        pod: {reference["name"] for reference in secrets(variables).values()}
        for pod, variables in containers(store, apart=True).items()
    }
    writes = {"writer"} if credentials is not None else set()
    trainers = {pod: writes for pod in names if pod.startswith("main/")}
    explorers = {pod: {"reader"} for pod in names if pod.startswith("far/")}
    assert names == trainers | explorers
    assert len(trainers) == len(explorers) == 2


def test_other_methods_have_no_store() -> None:
    target = Target(make_run(spec()), 7, 5, MonitorSettings("monitor:1"))
    built = raycluster.build(target, target.run.spec.clusters[0])
    assert "SYNC_STORE" not in str(built)
