"""A run whose checkpoints are in a bucket, with no volume at all: a trainer, the S3 server and the
monitor are killed in turn. Explorers get weights by the method `nccl` before and after."""

import json
import os
import signal
from contextlib import ExitStack

import pytest
from trainsync.api.names import LABEL_COMPONENT, LABEL_ROLE, LABEL_RUN, STORE_FAILING
from trainsync.api.protocol import SaveKind
from trainsync.storage.objects import commits, inspecting
from trainsync.storage.objects.bucket import Bucket
from trainsync.storage.objects.opening import StoreOptions, open_store

import demo.bucket
from demo.bucket import BUCKET, KEYS
from demo.kubectl import Object, wait_for
from demo.platform import Platform
from demo.play import verified
from tests.e2e import example, harness
from tests.store.servers.server import ACCESS, REGION, SECRET, Server, serving

# Without the fixtures' time: the first server is built from source.
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600, func_only=True)]

NAME = "in-bucket"
STEPS, INTERVAL, KEPT = 40, 4, 2
# For the trainer: saves wait for the server.
POLICY = {"maxRestarts": 1, "backoffSeconds": 0}
SYNC = {"method": "nccl", "style": "explorer_driven", "interval": 2, "timeoutSeconds": 60}
CHECKPOINT = SaveKind.CHECKPOINT


@pytest.fixture
def bucket(server: Server) -> Bucket:
    options = StoreOptions(
        endpoint=server.endpoint,
        region=REGION,
        allow_http=True,
        credentials={"access_key_id": ACCESS, "secret_access_key": SECRET},
    )
    return open_store(f"s3://{BUCKET}/{NAME}", options)


def reasons(raw: Object) -> set[str]:
    return {each["reason"] for each in (raw.get("status") or {}).get("conditions") or []}


def test_a_run_without_a_volume_outlives_its_trainer_its_bucket_s_server_and_its_monitor(
    platform: Platform, server: Server, bucket: Bucket, again: ExitStack
) -> None:
    kubectl, namespace = platform.kubectl, harness.NAMESPACE
    place = demo.bucket.Bucket(server.endpoint, ACCESS, SECRET)
    kubectl.apply(place.secret_object(), namespace=namespace)
    checkpoint = {
        "storage": place.storage(NAME),
        "interval": INTERVAL,
        "maxToKeep": KEPT,
        "verify": "digest",
        "memory": {"budget": "256Mi", "copies": 1},
    }
    run = example.start(
        platform, NAME, STEPS, checkpoint=checkpoint, failurePolicy=POLICY, sync=SYNC
    )
    try:
        run.wait(lambda seen, _: (seen.committed or 0) >= INTERVAL, "a step is committed", 240)
        selector = f"{LABEL_RUN}={NAME}"
        pods = kubectl.objects("pods", namespace, selector)
        assert not [p for p in pods for v in p["spec"]["volumes"] if "persistentVolumeClaim" in v]
        assert kubectl.objects("persistentvolumeclaims", namespace, selector) == []
        trainers = kubectl.objects("pods", namespace, f"{selector},{LABEL_ROLE}=Trainer")
        victim = trainers[-1]["metadata"]["name"]
        words = ("delete", "pod", victim, "--grace-period=0", "--force", "--wait=false")
        kubectl.run("-n", namespace, *words)
        resumed = run.wait(
            lambda seen, _: seen.metrics.get("resumed_step", 0) >= INTERVAL,
            "the next attempt goes on from the bucket",
            240,
        )
        assert (resumed.attempt, resumed.restarts) == (1, 1)
        wait_for(
            lambda: example.loaded_bytes(run, "memory") > 0,
            what="the rank whose pod lives on to load from its memory",
            seconds=60,
        )
        os.kill(server.pid, signal.SIGKILL)
        run.wait(lambda _, raw: STORE_FAILING in reasons(raw), "the run says so", 120)
        again.enter_context(serving(server.program, server.root, server.host, server.port))
        of_monitor = f"{selector},{LABEL_COMPONENT}=monitor"
        kubectl.run("-n", namespace, *words[:2], "-l", of_monitor, *words[3:])
        end = run.wait_complete(300)
        assert (end.attempt, end.restarts) == (1, 1), "a save failed with its server"
        assert end.metrics["resumed_step"] >= INTERVAL
        assert end.committed == STEPS
        example.check_explorers(run, end, "nccl", STEPS)
        told = [kubectl.objects(kind, namespace) for kind in ("pods", "events", "trainingruns")]
        assert SECRET not in json.dumps(told)
    finally:
        run.delete()
        kubectl.delete("secret", KEYS, namespace)
    # The bucket outlives the run.
    steps = commits.committed_steps(bucket, CHECKPOINT)
    assert steps == [STEPS - INTERVAL, STEPS]
    for step in steps:
        stored = commits.read_manifest(bucket, CHECKPOINT, step)
        assert inspecting.size_findings(bucket, stored) == []
    assert verified(place.verify(NAME)).whole == tuple(steps)
