"""Servers of a run that has no volume: their agents follow what trainers publish into a bucket,
also when the S3 server is away for a while, and when a pod of servers is replaced."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from trainsync.api.names import LABEL_COMPONENT, LABEL_RUN

import demo.bucket
from demo.bucket import BUCKET, KEYS
from demo.kubectl import Object
from demo.platform import Platform, devcluster_name, own_cluster
from devcluster import lifecycle
from devcluster.shell import Progress
from devcluster.tools import ensure_store_servers
from tests.cluster.fake_server import loading_server
from tests.e2e import example, harness
from tests.store.server import ACCESS, SECRET, Server, serving

# Without the fixtures' time: the first server is built from source.
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600, func_only=True)]

NAME = "served-by-bucket"
STEPS = 100_000
"""More than are trained before the test ends the run."""
# A save that fails for the server's death ends the example's attempt.
POLICY = {"maxRestarts": 3, "backoffSeconds": 0}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """An S3 server on this machine, which the development cluster's pods reach."""
    if own_cluster(os.environ.get("KUBECONFIG")):
        pytest.skip("KUBECONFIG is a cluster of yours, whose pods do not reach this machine")
    host = lifecycle.require_record(devcluster_name(os.environ.get("KUBECONFIG"))).cluster
    program = ensure_store_servers(Progress()).path("versitygw")
    with serving(program, tmp_path / "data", host.host_address) as found:
        found.bucket(BUCKET)
        yield found


@pytest.fixture
def again() -> Iterator[ExitStack]:
    """Ends servers that the test starts."""
    with ExitStack() as stack:
        yield stack


def reported(raw: Object) -> list[dict[str, Any]]:
    """What the status says of the servers."""
    weights = (raw.get("status") or {}).get("weights") or {}
    return list(weights.get("servers") or [])


def ready_with(raw: Object, version: int) -> bool:
    return any(one["ready"] and one["version"] >= version for one in reported(raw))


def test_servers_of_a_run_without_a_volume_follow_it_through_its_bucket(
    platform: Platform, server: Server, again: ExitStack
) -> None:
    kubectl, namespace = platform.kubectl, harness.NAMESPACE
    place = demo.bucket.Bucket(server.endpoint, ACCESS, SECRET)
    kubectl.apply(place.secret_object(), namespace=namespace)
    storage = place.storage(NAME)
    sync = {
        "method": "store",
        "store": {**storage["objectStore"], "url": f"s3://{BUCKET}/{NAME}-weights"},
        "style": "trainer_driven",
        "interval": 2,
        "timeoutSeconds": 60,
    }
    run = example.start(
        platform,
        NAME,
        STEPS,
        checkpoint={"storage": storage, "interval": 10, "maxToKeep": 2},
        sync=sync,
        failurePolicy=POLICY,
        servers=[{**loading_server(platform, "rollout"), "maxStaleness": 100}],
    )
    try:
        run.wait(lambda _, raw: ready_with(raw, 2), "a server has a version", 300)
        selector = f"{LABEL_RUN}={NAME}"
        of_servers = f"{selector},{LABEL_COMPONENT}=server"
        pods = kubectl.objects("pods", namespace, selector)
        assert not [p for p in pods for v in p["spec"]["volumes"] if "persistentVolumeClaim" in v]
        (pod,) = kubectl.objects("pods", namespace, of_servers)
        (container,) = pod["spec"]["containers"]
        assert "STORE" not in json.dumps(container.get("env")), "the agent alone has keys"

        os.kill(server.pid, signal.SIGKILL)
        seen = run.seen[-1].version or 0
        again.enter_context(serving(server.program, server.root, server.host, server.port))
        run.wait(lambda _, raw: ready_with(raw, seen + 4), "it follows again", 240)

        before = pod["metadata"]["name"]
        words = ("delete", "pod", before, "--grace-period=0", "--force", "--wait=false")
        kubectl.run("-n", namespace, *words)
        now = run.seen[-1].version or 0
        run.wait(
            lambda _, raw: (
                ready_with(raw, now)
                and any(one["name"] != before and one["ready"] for one in reported(raw))
            ),
            "the pod in its place begins at an anchor",
            240,
        )
        told = [kubectl.objects(kind, namespace) for kind in ("pods", "events", "trainingruns")]
        assert SECRET not in json.dumps(told)
    finally:
        run.delete()
        kubectl.delete("secret", KEYS, namespace)
