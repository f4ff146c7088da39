"""The monitor of a run: its pod, its image, its service and its rights."""

import pytest
from trainsync.api.names import ANNOTATION_HASH, LABEL_RUN
from trainsync_operator.builders import (
    monitor_deployment,
    monitor_image,
    monitor_rbac,
    service,
)
from trainsync_operator.builders.target import MonitorSettings, Target
from trainsync_operator.kube.kinds import CLUSTER_ROLE, ROLE
from trainsync_operator.rbac import MONITOR_RULES, RUN_RULES, bind_rule

from tests.unit.operator.builders.built import built_cluster, target, trainer_pod
from tests.unit.operator.support import make_run, spec


def test_the_monitor_is_one_locked_down_pod() -> None:
    deployment = monitor_deployment.build(target())
    assert deployment["spec"]["replicas"] == 1
    assert deployment["spec"]["strategy"] == {"type": "Recreate"}
    pod = deployment["spec"]["template"]["spec"]
    security = pod["securityContext"]
    assert (security["runAsNonRoot"], security["runAsUser"]) == (True, 65532)
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}
    (container,) = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert container["image"] == "monitor:1"


def test_a_runs_own_monitor_image_and_resources_win() -> None:
    monitor = {"image": "own:1", "resources": {"requests": {"cpu": 1}, "limits": {}}}
    pod = monitor_deployment.build(target(spec(monitor=monitor)))["spec"]["template"]["spec"]
    assert pod["containers"][0]["image"] == "own:1"
    assert pod["containers"][0]["resources"] == {"requests": {"cpu": 1}, "limits": {}}


def test_a_clouds_identity_is_given_by_annotations_and_labels_that_change_none_of_ours() -> None:
    plain = target()
    role, use = {"eks.amazonaws.com/role-arn": "arn:a"}, {"azure.workload.identity/use": "true"}
    asked = target(
        spec(
            monitor={
                "serviceAccountAnnotations": {**role, ANNOTATION_HASH: "mine"},
                "podLabels": {**use, LABEL_RUN: "another"},
            }
        )
    )
    account, before = monitor_rbac.service_account(asked), monitor_rbac.service_account(plain)
    annotations = account["metadata"]["annotations"]
    assert role.items() <= annotations.items()
    assert annotations[ANNOTATION_HASH] not in (
        "mine",
        before["metadata"]["annotations"][ANNOTATION_HASH],
    )
    deployment, ours = (
        monitor_deployment.build(asked)["spec"],
        monitor_deployment.build(plain)["spec"],
    )
    labels = ours["template"]["metadata"]["labels"]
    assert deployment["template"]["metadata"]["labels"] == {**use, **labels}
    assert deployment["selector"] == ours["selector"]


@pytest.mark.parametrize(
    ("image", "name"),
    [
        ("monitor", "monitor"),
        ("registry.example:5000/rl/monitor:1", "registry.example:5000/rl/monitor"),
        ("registry.example:5000/monitor", "registry.example:5000/monitor"),
        ("rl/monitor:1@sha256:00", "rl/monitor"),
    ],
)
def test_an_images_repository_has_neither_tag_nor_digest(image: str, name: str) -> None:
    assert monitor_image.repository(image) == name


@pytest.mark.parametrize(
    ("asked", "allowed", "fine"),
    [
        (None, (), True),
        ("own.example/monitor:2", (), True),
        ("own.example/monitor@sha256:00", (), True),
        ("own.example/monitors:1", (), False),
        ("own.example/monitor/other", (), False),
        ("other.example/rl/monitor:1", (), False),
        ("other.example/rl/monitor:1", ("other.example/rl/monitor",), True),
        ("other.example/rl/monitor:1", ("other.example/rl/",), True),
        ("other.example/rl/monitor:1", ("other.example/rl",), False),
        ("other.example/rl-evil/monitor:1", ("other.example/rl/",), False),
        ("other.example/rl/monitor:1", ("*",), True),
    ],
)
def test_a_monitors_image_comes_from_an_allowed_repository(
    asked: str | None, allowed: tuple[str, ...], fine: bool
) -> None:
    chosen = MonitorSettings("own.example/monitor:1", allowed=allowed)
    refused = monitor_image.why_refused(asked, chosen, running=None)
    assert (refused is None) == fine
    assert monitor_image.why_refused(asked, chosen, running=asked) is None


def test_the_monitor_is_pulled_with_the_secrets_that_the_operator_was_given() -> None:
    without = monitor_deployment.build(target())["spec"]["template"]["spec"]
    assert "imagePullSecrets" not in without
    image = MonitorSettings("registry.example/monitor:1", ("first", "second"))
    built = monitor_deployment.build(Target(make_run(), 7, 5, image))["spec"]["template"]["spec"]
    assert built["imagePullSecrets"] == [{"name": "first"}, {"name": "second"}]


def test_the_service_selects_the_monitors_pod_and_no_other() -> None:
    selector = service.build(target())["spec"]["selector"]
    pod = monitor_deployment.build(target())["spec"]["template"]["metadata"]["labels"]
    assert selector.items() <= pod.items()
    ray = built_cluster()["spec"]["workerGroupSpecs"][0]["template"]["metadata"]["labels"]
    assert not selector.items() <= ray.items()


def test_each_monitor_is_bound_to_the_charts_role_in_its_namespace_alone() -> None:
    binding = monitor_rbac.role_binding(target())
    role = {"kind": "ClusterRole", "name": "trainsync-operator-monitor"}
    assert binding["roleRef"] == {"apiGroup": "rbac.authorization.k8s.io", **role}
    assert binding["metadata"]["namespace"] == "team"
    (subject,) = binding["subjects"]
    assert subject == {"kind": "ServiceAccount", "name": "tiny-monitor", "namespace": "team"}


def test_another_role_has_another_binding_as_a_role_ref_cannot_be_changed() -> None:
    settings = [
        MonitorSettings("m", role=role, role_kind=kind)
        for role in ("one", "two")
        for kind in (ROLE, CLUSTER_ROLE)
    ]
    found = {monitor_rbac.binding_name("tiny", each) for each in settings}
    assert len(found) == 4
    assert "tiny-monitor" not in found  # of releases that made a Role for each run


def test_monitors_write_status_and_leases_and_post_events() -> None:
    rules = {name: set(rule.verbs) for rule in MONITOR_RULES for name in rule.resources}
    assert rules == {
        "trainingruns": {"get"},
        "trainingruns/status": {"patch"},
        "leases": {"create", "get", "update"},
        "events": {"create"},
    }


def test_the_operator_holds_no_lease_and_no_role_of_the_runs_namespaces() -> None:
    held = {name for rule in RUN_RULES for name in rule.resources}
    assert not {"leases", "roles", "clusterroles"} & held
    assert "escalate" not in {verb for rule in RUN_RULES for verb in rule.verbs}
    bind = bind_rule(CLUSTER_ROLE, "x-monitor").to_dict()
    assert (bind["verbs"], bind["resourceNames"]) == (["bind"], ["x-monitor"])


def test_the_operator_has_no_wildcard_no_secrets_and_no_exec() -> None:
    for rule in RUN_RULES:
        assert "*" not in (*rule.verbs, *rule.resources, rule.group)
        assert not {"secrets", "pods/exec"} & set(rule.resources)


def test_containers_that_fail_leave_their_last_lines_in_the_status() -> None:
    own = {"name": "own", "image": "x", "terminationMessagePolicy": "File"}
    template = {"spec": {"containers": [{"name": "ray"}], "initContainers": [{"name": "i"}, own]}}
    changed = spec()
    changed["clusters"][0]["groups"][0]["template"] = template
    pod = trainer_pod(built_cluster(changed))
    first, second = pod["initContainers"]
    for container in (first, pod["containers"][0]):
        assert container["terminationMessagePolicy"] == "FallbackToLogsOnError"
    assert second["terminationMessagePolicy"] == "File"
    monitor = monitor_deployment.build(target())["spec"]["template"]["spec"]["containers"][0]
    assert monitor["terminationMessagePolicy"] == "FallbackToLogsOnError"
