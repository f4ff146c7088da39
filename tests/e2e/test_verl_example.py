"""The verl example on the cluster, with verl's engine on CPUs in place of its trainer."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from trainsync.api import names

from demo.platform import Platform
from tests.e2e import harness
from tests.ray_params import LITTLE_HEAD, LITTLE_RAY

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600)]

MANIFEST = Path(__file__).resolve().parents[2] / "examples" / "verl_grpo" / "fsdp.yaml"
NAME = "verl-on-cpus"
METHOD = "memory"
STEPS = 6
INTERVAL = 3
TRAINER = 1234
"""User of the Ray pods. The monitor has another user; both share only the run's group. The umask is
the container's, 022."""
EXPLORERS = 1


def on_cpus(run: dict[str, Any]) -> dict[str, Any]:
    """The manifest with the entrypoint replaced, and without fields that need a GPU cluster."""
    run = json.loads(json.dumps(run))  # copies objects that YAML anchors share
    (cluster,) = run["spec"]["clusters"]
    cluster["entrypoint"] = (
        f"python -m verl_grpo.train_on_cpu --steps {STEPS} --explorers {EXPLORERS}"
    )
    groups = {group["name"]: group for group in cluster["groups"]}
    groups["explorer"]["replicas"] = EXPLORERS
    for owner in (cluster["head"], *cluster["groups"]):
        owner["rayStartParams"] = LITTLE_HEAD if owner is cluster["head"] else LITTLE_RAY
        pod = owner["template"]["spec"]
        (container,) = pod["containers"]
        container["resources"] = {"requests": {"cpu": "50m", "memory": "128Mi"}}
        # The engine on CPUs reads no data set.
        container["volumeMounts"] = [m for m in container["volumeMounts"] if m["name"] != "data"]
        pod["volumes"] = [volume for volume in pod["volumes"] if volume["name"] != "data"]
        pod["securityContext"] = {"runAsUser": TRAINER, "runAsGroup": TRAINER}
        # The image has no such user.
        container["env"] = [{"name": "HOME", "value": "/tmp"}, {"name": "USER", "value": "trainer"}]
    spec = run["spec"]
    claim = {"size": "1Gi", "retentionPolicy": "Delete"}
    spec["checkpoint"]["storage"] = {"volumeClaimTemplate": claim}
    spec["checkpoint"]["interval"] = INTERVAL
    spec["checkpoint"]["path"] = run["metadata"]["name"] = NAME
    spec["sync"] = {"method": METHOD, "timeoutSeconds": 60}
    spec["failurePolicy"]["backoffSeconds"] = 1
    spec["ttlSecondsAfterFinished"] = 0
    return run


def test_verls_engine_trains_saves_and_sends_its_weights_in_the_pods_of_the_example(
    platform: Platform,
) -> None:
    manifest = on_cpus(yaml.safe_load(MANIFEST.read_text()))
    platform.kubectl.apply(platform.fit(manifest), namespace=harness.NAMESPACE)
    run = harness.Run(platform, NAME)
    try:
        end = run.wait_complete(400)
        assert (end.step, end.committed) == (STEPS, STEPS)
        assert (end.version, end.explorers, end.lag) == (STEPS, EXPLORERS, 0)
        # At least at the end; an explorer with wrong weights fails the run.
        assert end.metrics["equal_digests"] >= EXPLORERS
        raw = platform.kubectl.get(names.PLURAL, NAME, harness.NAMESPACE) or {}
        assert raw["status"]["weights"]["method"] == METHOD
        assert run.committed() == [INTERVAL, STEPS]
        run.verify()
    finally:
        run.delete()
