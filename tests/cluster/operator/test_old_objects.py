"""What is left of an earlier time: a pod that does not go, and the job of a deleted namesake."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from trainsync.api import names

from demo.platform import Platform
from tests.cluster.conftest import Kubectl, wait_until
from tests.cluster.operator.operator_process import running_operator
from tests.cluster.prepared import prepared
from tests.cluster.ray_runs import (
    REPORTING,
    START_SECONDS,
    condition,
    delete,
    start,
    status,
    wait_phase,
)

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("crd"),
]

HOLD = "example.com/hung-volume"
GRACE_SECONDS = 2
# The operator calls a pod stuck 15 s after its grace period.
WATCHED_SECONDS = 22.0


@pytest.fixture(scope="module")
def platform() -> Platform:
    return prepared()


@pytest.fixture(scope="module")
def ns(
    module_namespace: Kubectl, platform: Platform, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Kubectl]:
    directory: Path = tmp_path_factory.mktemp("operator")
    with running_operator(module_namespace, directory, platform.images.monitor):
        yield module_namespace


def test_an_explorer_pod_that_does_not_go_is_no_lost_node_and_holds_no_attempt_up(
    ns: Kubectl, platform: Platform
) -> None:
    start(ns, platform, "hung", f"python -c '{REPORTING}'", explorers=1)
    wait_phase(ns, "hung", "Running")
    (pod,) = explorers(ns)
    try:
        hold(ns, pod, [HOLD])
        ns("delete", "pod", pod, f"--grace-period={GRACE_SECONDS}", "--wait=false")
        stays_as_it_is(ns, pod, attempt=0)

        # The next attempt has RayClusters of its own, beside the pod that does not go.
        patch = {"spec": {"sync": {"interval": 7}}}
        ns("patch", "trainingrun", "hung", "--type=merge", "-p", json.dumps(patch))
        wait_until("there is a new attempt", lambda: status(ns, "hung")["attempt"] == 1)
        wait_phase(ns, "hung", "Running")
        stays_as_it_is(ns, pod, attempt=1)
    finally:
        hold(ns, pod, None)
    wait_until("the pod is gone", lambda: ns.get("pod", pod) is None)
    delete(ns, "hung")


def stays_as_it_is(ns: Kubectl, pod: str, *, attempt: int) -> None:
    """Nothing is restarted for long enough, while the pod is there."""
    end = time.monotonic() + WATCHED_SECONDS
    while time.monotonic() < end:
        assert ns.get("pod", pod) is not None
        now = status(ns, "hung")
        seen = (now["phase"], now["attempt"], now["restarts"], now["infrastructureRestarts"])
        assert seen == ("Running", attempt, 0, 0), condition(ns, "hung", "Ready")
        time.sleep(1)


def explorers(ns: Kubectl) -> list[str]:
    selector = f"{names.LABEL_RUN}=hung,{names.LABEL_ROLE}=Explorer"
    return [pod["metadata"]["name"] for pod in ns.list("pod", selector)]


def hold(ns: Kubectl, pod: str, finalizers: list[str] | None) -> None:
    patch = json.dumps({"metadata": {"finalizers": finalizers}})
    ns.run("patch", "pod", pod, "--type=merge", "-p", patch)


def test_the_succeeded_job_of_a_namesake_that_was_deleted_alone_completes_no_other_run(
    ns: Kubectl, platform: Platform
) -> None:
    start(ns, platform, "twice", "true", ttl=3600)
    wait_phase(ns, "twice", "Complete")
    old = uid_of(ns, "rayjob")
    ns("delete", "trainingrun", "twice", "--cascade=orphan")
    assert uid_of(ns, "rayjob") == old
    time.sleep(1.1)  # times of creation are whole seconds

    start(ns, platform, "twice", "true", ttl=3600)

    def said() -> bool:
        ready = condition(ns, "twice", "Ready")
        return ready["reason"] == "NameTaken" and "RayCluster twice-main-0" in ready["message"]

    wait_until("the status names what is in the way", said)
    now = status(ns, "twice")
    assert now["phase"] not in ("Complete", "Running")
    assert "completionTime" not in now
    assert uid_of(ns, "rayjob") == old, "the operator took what is not its own"
    ns("delete", "raycluster", "twice-main-0")
    ns("delete", "rayjob", "twice-main-0", "--ignore-not-found")
    wait_phase(ns, "twice", "Complete", START_SECONDS)
    assert uid_of(ns, "rayjob") != old, "it was trained by a job of its own"
    assert status(ns, "twice")["attempt"] == 0
    delete(ns, "twice")


def uid_of(ns: Kubectl, kind: str) -> str:
    found: dict[str, Any] | None = ns.get(kind, "twice-main-0")
    assert found is not None
    uid: str = found["metadata"]["uid"]
    return uid
