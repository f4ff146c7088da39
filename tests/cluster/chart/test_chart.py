"""Install, upgrade, rollback and uninstall of the chart on a real cluster while a run trains."""

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import yaml
from trainsync.api import names
from trainsync_operator.builders.target import DEFAULT_ROLE
from trainsync_operator.kube.kinds import BUDGET, ROLE, ROLE_BINDING
from trainsync_operator.rbac import MONITOR_RULES, RUN_RULES, PolicyRule

from demo.kubectl import wait_for
from demo.platform import Platform
from tests.cluster.alive_run import AliveRun
from tests.cluster.chart.helm import PREVIOUS_CHART
from tests.cluster.conftest import CRD_FILE
from tests.cluster.prepared import prepared

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(420)]

RELEASE = "trainsync-operator-chart"
WATCHED = "trainsync-chart-runs"
CRD = f"{names.PLURAL}.{names.GROUP}"
OURS = f"app.kubernetes.io/instance={RELEASE}"


@pytest.fixture
def platform() -> Iterator[Platform]:
    made = prepared()
    for namespace in (RELEASE, WATCHED):
        made.make_namespace(namespace)
    # The chart's pods must be admitted under the strictest Pod Security level.
    level = "pod-security.kubernetes.io/enforce=restricted"
    made.kubectl.run("label", "--overwrite", "namespace", RELEASE, level)
    yield made
    for namespace in (WATCHED, RELEASE):
        made.kubectl.run("delete", "namespace", namespace, "--ignore-not-found", timeout=120)


def role_of(name: str, rules: Iterable[PolicyRule]) -> dict[str, Any]:
    return {
        "apiVersion": ROLE.api_version,
        "kind": ROLE.name,
        "metadata": {"name": name},
        "rules": [rule.to_dict() for rule in rules],
    }


def operator_arguments(platform: Platform) -> list[str]:
    deployment = platform.kubectl.get("deployment", RELEASE, RELEASE)
    assert deployment is not None
    (operator,) = deployment["spec"]["template"]["spec"]["containers"]
    return list(operator["args"])


def bound_roles(platform: Platform) -> set[str]:
    """Roles that monitors are bound to."""
    selector = f"{names.LABEL_COMPONENT}=monitor"
    bindings = platform.kubectl.objects("rolebindings", WATCHED, selector)
    return {binding["roleRef"]["name"] for binding in bindings}


def test_a_run_lives_through_the_charts_whole_life(platform: Platform) -> None:
    kubectl = platform.kubectl
    # The previous chart gets the present operator's image, and lacks its CRD, the role it binds to
    # monitors, and its rights on kinds that are new.
    kubectl.apply(yaml.safe_load(CRD_FILE.read_text()), namespace=RELEASE)
    kubectl.apply(role_of(DEFAULT_ROLE, MONITOR_RULES), namespace=WATCHED)
    new_kinds = [rule for rule in RUN_RULES if rule.group == BUDGET.group]
    bound = {
        "apiVersion": ROLE_BINDING.api_version,
        "kind": ROLE_BINDING.name,
        "metadata": {"name": "new-kinds"},
        "roleRef": {"apiGroup": ROLE.group, "kind": ROLE.name, "name": "new-kinds"},
        "subjects": [{"kind": "ServiceAccount", "name": RELEASE, "namespace": RELEASE}],
    }
    kubectl.apply(role_of("new-kinds", new_kinds), bound, namespace=WATCHED)
    platform.install_chart(RELEASE, [WATCHED], "crds.enabled=false", chart=PREVIOUS_CHART)
    run = AliveRun(platform, WATCHED)

    # upgrade from the previous chart
    platform.install_chart(RELEASE, [WATCHED], "replicas=2", "podDisruptionBudget.enabled=true")
    assert "--workers=4" in operator_arguments(platform)
    lease = kubectl.get("lease", "trainsync-operator", RELEASE)
    assert lease is not None, "the operator did not take its Lease"
    wait_for(
        lambda: bound_roles(platform) == {DEFAULT_ROLE, f"{RELEASE}-monitor"},
        what="the monitor to be bound to the role of the new chart",
        seconds=60,
    )
    run.assert_untouched()
    told = platform.run_helm("test", RELEASE, "--namespace", RELEASE, "--timeout=120s")
    assert "Phase:          Succeeded" in told

    # rollback to the previous chart
    platform.run_helm("rollback", RELEASE, "1", "--namespace", RELEASE, "--wait")
    assert "--workers=4" not in operator_arguments(platform)
    assert kubectl.objects("poddisruptionbudgets", RELEASE, OURS) == []
    run.assert_untouched()

    # uninstall: no object of the user is deleted
    platform.run_helm("uninstall", RELEASE, "--namespace", RELEASE, "--wait")
    left = "deployments,services,roles,rolebindings,serviceaccounts,pods"
    wait_for(lambda: kubectl.objects(left, RELEASE, OURS) == [], what="pods to go", seconds=60)
    assert kubectl.objects("rolebindings", WATCHED, OURS) == []
    kept = kubectl.objects("roles", WATCHED, OURS)
    assert [role["metadata"]["labels"]["app.kubernetes.io/component"] for role in kept] == [
        "monitor"
    ]
    assert kubectl.get("crd", CRD, RELEASE) is not None, "the CRD went with the release"
    run.assert_untouched()

    # after a new install the operator takes over the unchanged run
    platform.install_chart(RELEASE, [WATCHED])
    run.assert_untouched()
    run.delete()
