"""Two runs in one bucket, with no volume at all.

Of the first a trainer's pod, in whose place the job gets another one, the monitor and the S3 server
are killed in turn; explorers get weights by the method `nccl` before and after. The second has
servers, whose agents follow what trainers publish into the bucket, and pass it on, also when the S3
server is away for a while, and when a pod of servers is replaced.
"""

import json
import os
import signal
from contextlib import ExitStack
from typing import Any

import pytest
from trainsync.api.names import AGENT_PORT, LABEL_COMPONENT, LABEL_ROLE, LABEL_RUN, STORE_FAILING
from trainsync.api.protocol import SaveKind
from trainsync.storage.objects import commits, inspecting
from trainsync.storage.objects.bucket import ObjectBucket
from trainsync.storage.objects.opening import StoreOptions, open_store
from trainsync_operator.builders.servers.pod import AGENT

import demo.bucket
from demo.bucket import BUCKET, KEYS
from demo.kubectl import Kubectl, Object, wait_for
from demo.platform import Platform
from demo.play import verified
from demo.snapshot import Snapshot
from tests.cluster.fake_server import loading_server
from tests.e2e import example, harness
from tests.store.servers.server import ACCESS, REGION, SECRET, Server, serving

# Without the fixtures' time: the first server is built from source.
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900, func_only=True)]

NAME, SERVED = "in-bucket", "served-by-bucket"
STEPS, INTERVAL, KEPT = 120, 4, 2
ENDLESS = 100_000
"""More steps than are trained before the test ends the run."""
CHECKPOINT = SaveKind.CHECKPOINT
NOW = ("--grace-period=0", "--force", "--wait=false")


@pytest.fixture
def bucket(server: Server) -> ObjectBucket:
    options = StoreOptions(
        endpoint=server.endpoint,
        region=REGION,
        allow_http=True,
        credentials={"access_key_id": ACCESS, "secret_access_key": SECRET},
    )
    return open_store(f"s3://{BUCKET}/{NAME}", options)


@pytest.fixture
def place(platform: Platform, server: Server) -> demo.bucket.Bucket:
    """The bucket as pods reach it."""
    return demo.bucket.Bucket(server.endpoint, ACCESS, SECRET)


def start_trained(platform: Platform, place: demo.bucket.Bucket) -> harness.Run:
    """The run that loses its trainer and its monitor."""
    checkpoint = {
        "storage": place.storage(NAME),
        "interval": INTERVAL,
        "maxToKeep": KEPT,
        "verify": "digest",
        "memory": {"budget": "256Mi", "copies": 1},
    }
    sync = {"method": "nccl", "style": "explorer_driven", "interval": 2, "timeoutSeconds": 60}
    # Neither the trainer's pod nor saves, which wait for the server, end the attempt.
    policy = {"maxRestarts": 0, "podReplacementSeconds": 240}
    pace = "--step-seconds 0.5"  # it trains on while the server is away
    return example.start(
        platform, NAME, STEPS, pace, checkpoint=checkpoint, failurePolicy=policy, sync=sync
    )


def start_served(platform: Platform, place: demo.bucket.Bucket) -> harness.Run:
    """The run with servers. KubeRay's init containers ask for so much that no more pods fit."""
    storage = place.storage(SERVED)
    sync = {
        "method": "store",
        "store": {**storage["objectStore"], "url": f"s3://{BUCKET}/{SERVED}-weights"},
        "style": "trainer_driven",
        "interval": 2,
        "timeoutSeconds": 60,
    }
    servers = loading_server(platform, "rollout")
    servers |= {"replicas": 2, "maxStaleness": 100, "sync": {"fellows": True}}
    return example.start(
        platform,
        SERVED,
        ENDLESS,
        "--step-seconds 1",
        replicas=1,
        checkpoint={"storage": storage, "interval": 10, "maxToKeep": 2},
        sync=sync,
        # A save that fails for the server's death ends the example's attempt.
        failurePolicy={"maxRestarts": 3, "backoffSeconds": 0},
        servers=[servers],
    )


def reasons(raw: Object) -> set[str]:
    return {each["reason"] for each in (raw.get("status") or {}).get("conditions") or []}


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


def kill_trainer(run: harness.Run) -> None:
    """Delete a trainer's pod, once a step is committed."""
    run.wait(lambda seen, _: (seen.committed or 0) >= INTERVAL, "a step is committed", 240)
    selector = f"{LABEL_RUN}={run.name},{LABEL_ROLE}=Trainer"
    victim = run.kubectl.objects("pods", harness.NAMESPACE, selector)[-1]["metadata"]["name"]
    run.kubectl.run("-n", harness.NAMESPACE, "delete", "pod", victim, *NOW)


def check_resumed(run: harness.Run) -> None:
    resumed = run.wait(
        lambda seen, _: seen.restarts_in_place == 1, "a rank starts in another pod", 240
    )
    committed = resumed.committed or 0
    run.wait(lambda seen, _: (seen.committed or 0) > committed, "it goes on in place", 120)
    wait_for(
        lambda: example.loaded_bytes(run, "memory") > 0,
        what="the rank whose pod lives on to load from its memory",
        seconds=60,
    )


def check_end(end: Snapshot, run: harness.Run) -> None:
    assert (end.attempt, end.restarts) == (0, 0), "a save failed with its server"
    assert end.committed == STEPS
    example.check_explorers(run, end, "nccl", STEPS)


def check_pods(kubectl: Kubectl) -> None:
    """No pod has a volume of the cluster, and no server has keys: its agent alone has."""
    for name in (NAME, SERVED):
        selector = f"{LABEL_RUN}={name}"
        pods = kubectl.objects("pods", harness.NAMESPACE, selector)
        assert not [p for p in pods for v in p["spec"]["volumes"] if "persistentVolumeClaim" in v]
        assert kubectl.objects("persistentvolumeclaims", harness.NAMESPACE, selector) == []
    for pod in server_pods(kubectl):
        (container,) = pod["spec"]["containers"]
        assert "STORE" not in json.dumps(container.get("env"))


def server_pods(kubectl: Kubectl) -> list[Object]:
    selector = f"{LABEL_RUN}={SERVED},{LABEL_COMPONENT}=server"
    return kubectl.objects("pods", harness.NAMESPACE, selector)


def test_runs_without_a_volume_outlive_a_trainer_the_monitor_a_server_and_the_bucket_s_server(
    platform: Platform,
    server: Server,
    bucket: ObjectBucket,
    place: demo.bucket.Bucket,
    again: ExitStack,
) -> None:
    kubectl, namespace = platform.kubectl, harness.NAMESPACE
    kubectl.apply(place.secret_object(), namespace=namespace)
    run, served = start_trained(platform, place), start_served(platform, place)
    try:
        kill_trainer(run)
        served.wait(lambda _, raw: len(ready_with(raw, 2)) == 2, "each server has a version", 300)
        check_pods(kubectl)
        check_resumed(run)

        os.kill(server.pid, signal.SIGKILL)
        run.wait(lambda _, raw: STORE_FAILING in reasons(raw), "the run says so", 120)
        before = served.seen[-1].version or 0
        again.enter_context(serving(server.program, server.root, server.host, server.port))
        of_monitor = f"{LABEL_RUN}={NAME},{LABEL_COMPONENT}=monitor"
        kubectl.run("-n", namespace, "delete", "pod", "-l", of_monitor, *NOW)

        served.wait(lambda _, raw: len(ready_with(raw, before + 4)) == 2, "they follow again", 240)
        victim, second = sorted(pod["metadata"]["name"] for pod in server_pods(kubectl))
        assert bytes_of_fellows(kubectl, second) > 0, "from the first one"
        kubectl.run("-n", namespace, "delete", "pod", victim, *NOW)
        version = served.seen[-1].version or 0
        served.wait(
            lambda _, raw: len({*ready_with(raw, version)} - {victim}) == 2,
            "the pod in its place begins at an anchor",
            240,
        )
        check_end(run.wait_complete(300), run)
        told = [kubectl.objects(kind, namespace) for kind in ("pods", "events", "trainingruns")]
        assert SECRET not in json.dumps(told)
    finally:
        run.delete()
        served.delete()
        kubectl.delete("secret", KEYS, namespace)
    # The bucket outlives the run.
    steps = commits.committed_steps(bucket, CHECKPOINT)
    assert steps == [STEPS - INTERVAL, STEPS]
    for step in steps:
        stored = commits.read_manifest(bucket, CHECKPOINT, step)
        assert inspecting.size_findings(bucket, stored) == []
    assert verified(place.verify(NAME)).whole == tuple(steps)
