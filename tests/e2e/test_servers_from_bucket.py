"""Servers of a run that has no volume: their agents follow what trainers publish into a bucket, and
pass it on, also when the S3 server is away for a while, and when a pod of servers is replaced."""

import json
import os
import signal
from contextlib import ExitStack
from typing import Any

import pytest
from trainsync.api.names import AGENT_PORT, LABEL_COMPONENT, LABEL_RUN
from trainsync_operator.builders.servers.pod import AGENT

import demo.bucket
from demo.bucket import BUCKET, KEYS
from demo.kubectl import Kubectl, Object
from demo.platform import Platform
from tests.cluster.fake_server import loading_server
from tests.e2e import example, harness
from tests.store.servers.server import ACCESS, SECRET, Server, serving

# Without the fixtures' time: the first server is built from source.
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600, func_only=True)]

NAME = "served-by-bucket"
STEPS = 100_000
"""More than are trained before the test ends the run."""
# A save that fails for the server's death ends the example's attempt.
POLICY = {"maxRestarts": 3, "backoffSeconds": 0}


def reported(raw: Object) -> list[dict[str, Any]]:
    """What the status says of the servers."""
    weights = (raw.get("status") or {}).get("weights") or {}
    return list(weights.get("servers") or [])


def ready_with(raw: Object, version: int) -> list[str]:
    """Names of the servers that are ready with a version, or a later one."""
    return [one["name"] for one in reported(raw) if one["ready"] and one["version"] >= version]


def bytes_of_fellows(kubectl: Kubectl, pod: str) -> float:
    """Bytes that a pod's agent has taken from another one."""
    url = f"http://$TRAINSYNC_AGENT_HOST:{AGENT_PORT}/metrics"
    ask = f"import urllib.request as u; print(u.urlopen('{url}', timeout=10).read().decode())"
    words = ("exec", pod, "-c", AGENT, "--", "sh", "-c", f'python3 -c "{ask}"')
    text = kubectl.run("-n", harness.NAMESPACE, *words, timeout=60)
    name = 'trainsync_agent_fetched_bytes_total{source="fellow"}'
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(name))


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
    servers = loading_server(platform, "rollout")
    servers |= {"replicas": 2, "maxStaleness": 100, "sync": {"fellows": True}}
    run = example.start(
        platform,
        NAME,
        STEPS,
        checkpoint={"storage": storage, "interval": 10, "maxToKeep": 2},
        sync=sync,
        failurePolicy=POLICY,
        servers=[servers],
    )
    try:
        run.wait(lambda _, raw: len(ready_with(raw, 2)) == 2, "each server has a version", 300)
        selector = f"{LABEL_RUN}={NAME}"
        of_servers = f"{selector},{LABEL_COMPONENT}=server"
        pods = kubectl.objects("pods", namespace, selector)
        assert not [p for p in pods for v in p["spec"]["volumes"] if "persistentVolumeClaim" in v]
        pods = kubectl.objects("pods", namespace, of_servers)
        for pod in pods:
            (container,) = pod["spec"]["containers"]
            assert "STORE" not in json.dumps(container.get("env")), "the agent alone has keys"

        os.kill(server.pid, signal.SIGKILL)
        seen = run.seen[-1].version or 0
        again.enter_context(serving(server.program, server.root, server.host, server.port))
        run.wait(lambda _, raw: len(ready_with(raw, seen + 4)) == 2, "they follow again", 240)
        before, second = sorted(pod["metadata"]["name"] for pod in pods)
        assert bytes_of_fellows(kubectl, second) > 0, "from the first one"

        words = ("delete", "pod", before, "--grace-period=0", "--force", "--wait=false")
        kubectl.run("-n", namespace, *words)
        now = run.seen[-1].version or 0
        run.wait(
            lambda _, raw: len({*ready_with(raw, now)} - {before}) == 2,
            "the pod in its place begins at an anchor",
            240,
        )
        told = [kubectl.objects(kind, namespace) for kind in ("pods", "events", "trainingruns")]
        assert SECRET not in json.dumps(told)
    finally:
        run.delete()
        kubectl.delete("secret", KEYS, namespace)
