"""What the operator tells and does of runs that fail or that it must not touch.

No pod starts here: the tests write the pods' status (`acted_pods`).
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.conftest import Kubectl, left_over, wait_until
from tests.cluster.manifests import changed
from tests.cluster.operator.acted_pods import (
    NO_IMAGE,
    act,
    pods_of,
    release,
    run_of,
    wait_for_job,
    wait_for_pod,
)
from tests.cluster.operator.operator_process import OperatorProcess, running_operator
from tests.cluster.ray_runs import condition, delete, status

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("crd"),
]

# Within which a cause must stand in the table of runs.
TOLD_SECONDS = 15.0
SECRET = "hunter2-of-nobody"
LAST_LINES = f"loading\nlogin with {SECRET} failed\n"
FOREIGN = "kueue.x-k8s.io/multikueue"


@pytest.fixture(scope="module")
def operator(
    module_namespace: Kubectl, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OperatorProcess]:
    directory: Path = tmp_path_factory.mktemp("operator")
    with running_operator(module_namespace, directory, NO_IMAGE, leader_elect=False) as process:
        yield process


@pytest.fixture(scope="module")
def ns(module_namespace: Kubectl, operator: OperatorProcess) -> Kubectl:
    """The operator's namespace."""
    return module_namespace


def create(ns: Kubectl, run: dict[str, Any]) -> None:
    done = ns.apply(run)
    assert done.returncode == 0, done.stderr


def messages(ns: Kubectl, run: str) -> list[str]:
    """Of the run's Events."""
    return [e["message"] for e in ns.list("events") if e["involvedObject"]["name"] == run]


def ended(reason: str, code: int) -> dict[str, Any]:
    return {"terminated": {"reason": reason, "exitCode": code, "message": LAST_LINES}}


def test_the_table_names_what_keeps_a_pod_from_starting_and_no_secret_is_told(
    ns: Kubectl,
) -> None:
    run = run_of("told")
    template = {"spec": {"containers": [{"env": [{"name": "HUB_TOKEN", "value": SECRET}]}]}}
    run = changed(run, "spec.clusters.0.head.template", template)
    create(ns, changed(run, "spec.clusters.0.groups.0.template", template))

    def shows(word: str) -> None:
        wait_until(f"the table says {word}", lambda: word in ns("get", "tr", "told"), TOLD_SECONDS)

    head = wait_for_pod(ns, "told", "Head")
    shows("Unschedulable")
    trainer = wait_for_pod(ns, "told", "Trainer")
    wait_until("its monitor's pod is there", lambda: len(pods_of(ns, "told")) == 3)
    for pod in pods_of(ns, "told"):
        act(ns, pod, {"running": {}})  # the condition has room for one pod
    waiting = {"reason": "CrashLoopBackOff", "message": "back-off 10s restarting failed container"}
    act(ns, head, {"waiting": waiting}, before=ended("Error", 1))
    shows("CrashLoopBackOff")
    masked = "Its last lines: loading | login with *** failed"

    def told(*parts: str) -> bool:
        said = condition(ns, "told", "Ready")["message"]
        assert all(part in said for part in parts), said
        return True

    wait_until("the condition has the last lines", lambda: told("CrashLoopBackOff", masked))
    act(ns, trainer, ended("Error", 7))
    wait_until("the condition says how it ended", lambda: told("Error, exit code 7", masked))
    assert condition(ns, "told", "Ready")["reason"] == "PodsFailing"
    said = "A pod of group trainer of cluster main ended: Error, exit code 7."
    assert f"{said} {masked}" in " ".join(messages(ns, "told"))
    release(ns, trainer)
    assert SECRET not in str((status(ns, "told"), messages(ns, "told")))
    delete(ns, "told")


def test_failures_are_told_apart_and_each_meets_the_rule_of_its_class(
    ns: Kubectl, operator: OperatorProcess
) -> None:
    template = {"spec": {"containers": [{"env": [{"name": "HUB_TOKEN", "value": SECRET}]}]}}
    actions = {"OutOfMemory": "RestartCluster", "Stall": "Ignore", "Image": "Fail"}
    monitor = {"ttlSecondsAfterFinished": 1}
    run = changed(run_of("ruled", monitor=monitor), "spec.failurePolicy", policy(actions))
    create(ns, changed(run, "spec.clusters.0.groups.0.template", template))

    def edit(**changes: Any) -> None:
        ns.patch("trainingrun", "ruled", {"spec": {"failurePolicy": changes}})

    def counts() -> tuple[int, int, int]:
        now = status(ns, "ruled")
        (cluster,) = now["clusters"]
        return now["restarts"], now["infrastructureRestarts"], cluster["attempt"]

    wait_for_job(ns, "ruled", 0)
    trainer = wait_for_pod(ns, "ruled", "Trainer")
    act(ns, trainer, ended("OOMKilled", 137))
    wait_until("attempt 1 begins", lambda: status(ns, "ruled")["attempt"] == 1)
    release(ns, trainer)
    assert counts() == (1, 0, 1), "it counts as one of the application, on new RayClusters"
    failure = status(ns, "ruled")["lastFailure"]
    assert (failure["class"], failure["reason"]) == ("OutOfMemory", "TrainerPodLost")
    masked = "OOMKilled, exit code 137. Its last lines: loading | login with *** failed"
    assert masked in failure["message"]
    (event,) = with_rule(ns, 0, "RestartCluster")
    assert masked in event

    wait_for_job(ns, "ruled", 1)
    edit(progressDeadlineSeconds=1)
    wait_until("a stall is told of", lambda: with_rule(ns, 1, "Ignore"))
    assert status(ns, "ruled")["lastFailure"]["class"] == "Stall"
    assert counts() == (1, 0, 1), "it is not counted, and the RayClusters stay"
    edit(**policy({**actions, "Stall": "Restart"}))
    wait_until("the next stall meets the edited rule", lambda: with_rule(ns, 1, "Restart"))
    restarts, infrastructure, of_cluster = counts()
    assert restarts >= 2
    assert (infrastructure, of_cluster) == (0, 1)

    waiting = {"reason": "ImagePullBackOff", "message": f"no image {NO_IMAGE}"}
    act(ns, wait_for_pod(ns, "ruled", "Trainer"), {"waiting": waiting})
    edit(progressDeadlineSeconds=None, startupDeadlineSeconds=1)
    wait_until("the run fails", lambda: status(ns, "ruled")["phase"] == "Failed")
    failed = condition(ns, "ruled", "Failed")
    assert failed["reason"] == "FailedByRule"
    assert failed["message"].startswith("spec.failurePolicy.rules[2] fails the run. ")
    assert status(ns, "ruled")["lastFailure"]["class"] == "Image"
    assert any("rules[2] fails the run" in message for message in messages(ns, "ruled"))
    for kind in actions:
        series = f'trainsync_run_failures_by_class_total{{class="{kind}"'
        assert operator.metric(series) >= 1, kind
    assert operator.metric('trainsync_run_failures_by_class_total{class="Application"') == 0
    assert SECRET not in str((status(ns, "ruled"), messages(ns, "ruled")))

    def monitor_is_gone() -> bool:
        deployment = ns.get("deployment", "ruled-monitor")
        assert deployment is not None
        return deployment["spec"]["replicas"] == 0 and pods_of(ns, "ruled") == []

    wait_until("its monitor and its pods are gone", monitor_is_gone)
    delete(ns, "ruled")


def policy(actions: dict[str, str]) -> dict[str, Any]:
    """A rule for each class, and restarts without end and back-off."""
    rules = [{"action": action, "onClasses": [kind]} for kind, action in actions.items()]
    return {"rules": rules, "backoffSeconds": 0, "maxRestarts": 900}


def with_rule(ns: Kubectl, index: int, action: str) -> list[str]:
    """Events of restarts by a rule."""
    words = f"spec.failurePolicy.rules[{index}]: {action}."
    return [message for message in messages(ns, "ruled") if words in message]


def test_a_run_of_another_controller_is_left_alone_and_a_foreign_monitor_image_is_refused(
    ns: Kubectl,
) -> None:
    create(ns, run_of("theirs", managedBy=FOREIGN))
    create(ns, run_of("unsafe", suspend=True, monitor={"image": "elsewhere.example/monitor:1"}))

    def refused() -> bool:
        ready = condition(ns, "unsafe", "Ready")
        return ready["reason"] == "InvalidSpec" and "elsewhere.example/monitor" in ready["message"]

    wait_until("the status refuses the image", refused)
    told = " ".join(messages(ns, "unsafe"))
    assert "monitorImage.allowed of the operator's chart" in told
    assert left_over(ns, "unsafe") == []
    assert "InvalidSpec" in ns("get", "tr", "unsafe")
    ns.patch("trainingrun", "unsafe", {"spec": {"monitor": {"image": None}}})
    wait_until("it has its monitor", lambda: ns.get("deployment", "unsafe-monitor"))
    delete(ns, "unsafe")

    # It was there before, and the operator has looked at it.
    theirs = ns.get("trainingrun", "theirs")
    assert theirs is not None
    assert "status" not in theirs
    assert (left_over(ns, "theirs"), messages(ns, "theirs")) == ([], [])
    delete(ns, "theirs")
