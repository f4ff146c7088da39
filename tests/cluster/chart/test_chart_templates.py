"""The chart's manifests for its values. Needs only helm, no cluster."""

import json
from typing import Any

import pytest
import yaml
from trainsync.api import names
from trainsync_operator import rbac
from trainsync_operator.builders import monitor_deployment, raycluster
from trainsync_operator.builders.target import MonitorSettings, Target
from trainsync_operator.kube.kinds import CLUSTER_ROLE, ROLE, Kind

from tests.cluster.chart.helm import CHART, EVERYTHING, Helm, Object, container, only
from tests.unit.operator.support import make_run

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]


def pod_spec(objects: list[Object]) -> dict[str, Any]:
    return dict(only(objects, "Deployment")["spec"]["template"]["spec"])


@pytest.fixture(scope="module")
def everything(helm: Helm) -> list[Object]:
    return helm.objects(values=EVERYTHING)


def test_helm_finds_nothing_to_complain_about(helm: Helm) -> None:
    assert "[WARNING]" not in helm("lint", "--strict", CHART)
    helm("lint", "--strict", CHART, "--values", EVERYTHING)


def test_the_values_with_everything_name_every_value(helm: Helm) -> None:
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    # Another test covers Roles in namespaces instead of a ClusterRole.
    assert set(yaml.safe_load(EVERYTHING.read_text())) == set(defaults) - {"watchNamespaces"}


def test_by_default_the_operator_serves_the_whole_cluster(helm: Helm) -> None:
    objects = helm.objects()
    only(objects, "ClusterRole", "x-trainsync-operator")
    binding = only(objects, "ClusterRoleBinding")
    account = only(objects, "ServiceAccount")["metadata"]
    assert binding["subjects"] == [
        {"kind": "ServiceAccount", "name": account["name"], "namespace": "here"}
    ]
    assert account["namespace"] == "here"
    assert not any("--namespace" in flag for flag in container(objects)["args"])


def test_with_namespaces_there_is_no_cluster_wide_right(helm: Helm) -> None:
    objects = helm.objects('watchNamespaces=["a","b"]', "serviceMonitor.enabled=true")
    assert "ClusterRoleBinding" not in [o["kind"] for o in objects]
    made = {o["metadata"]["name"] for o in objects if o["kind"] == "ClusterRole"}
    assert made == {"x-trainsync-operator-edit", "x-trainsync-operator-view"}  # of users
    roles = [o for o in objects if o["kind"] == "Role"]
    assert sorted(role["metadata"]["namespace"] for role in roles) == ["a", "a", "b", "b", "here"]
    assert {"--namespace=a", "--namespace=b"} <= set(container(objects)["args"])
    runs = only(objects, "ServiceMonitor", "x-trainsync-operator-runs")
    assert runs["spec"]["namespaceSelector"] == {"matchNames": ["a", "b"]}


@pytest.mark.parametrize(("namespaces", "kind"), [("[]", CLUSTER_ROLE), ('["a"]', ROLE)])
def test_the_operator_may_bind_the_role_of_monitors_and_no_other(
    helm: Helm, namespaces: str, kind: Kind
) -> None:
    objects = helm.objects(f"watchNamespaces={namespaces}")
    monitors = only(objects, kind.name, "x-trainsync-operator-monitor")
    assert monitors["rules"] == [rule.to_dict() for rule in rbac.MONITOR_RULES]
    # Runs, and so their monitors, live on when the chart is uninstalled.
    assert monitors["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    wanted = (*rbac.RUN_RULES, rbac.bind_rule(kind, monitors["metadata"]["name"]))
    operator = only(objects, kind.name, "x-trainsync-operator")
    assert operator["rules"] == [rule.to_dict() for rule in wanted]
    assert "--monitor-role=x-trainsync-operator-monitor" in container(objects)["args"]


@pytest.mark.parametrize("wanted", [True, False])
@pytest.mark.parametrize(("namespaces", "kind"), [("[]", CLUSTER_ROLE), ('["a"]', ROLE)])
def test_leader_worker_sets_are_for_an_operator_that_is_to_make_them(
    helm: Helm, namespaces: str, kind: Kind, wanted: bool
) -> None:
    setting = f"leaderWorkerSets.enabled={str(wanted).lower()}"
    objects = helm.objects(f"watchNamespaces={namespaces}", setting)
    rules = only(objects, kind.name, "x-trainsync-operator")["rules"]
    for rule in rbac.LEADER_WORKER_SET_RULES:
        assert (rule.to_dict() in rules) is wanted
    assert ("--leader-worker-sets" in container(objects)["args"]) is wanted


@pytest.mark.parametrize("highest", [0, 9])
def test_workloads_of_kueue_are_for_an_operator_that_is_to_boost_them(
    helm: Helm, highest: int
) -> None:
    objects = helm.objects(f"kueue.priorityBoost.max={highest}")
    rules = only(objects, CLUSTER_ROLE.name, "x-trainsync-operator")["rules"]
    for rule in rbac.PRIORITY_BOOST_RULES:
        assert (rule.to_dict() in rules) is (highest > 0)
    args = container(objects)["args"]
    assert ("--priority-boost-max=9" in args) is (highest > 0)
    assert ("--priority-boost-unit=600" in args) is (highest > 0)


def test_nothing_but_the_operator_is_there_by_default(helm: Helm) -> None:
    kinds = sorted({o["kind"] for o in helm.objects()})
    assert kinds == [
        "ClusterRole",
        "ClusterRoleBinding",
        "CustomResourceDefinition",
        "Deployment",
        "Pod",  # of `helm test`
        "Role",
        "RoleBinding",
        "Service",
        "ServiceAccount",
    ]


@pytest.mark.parametrize("kind", ["Deployment", "Pod"])
def test_every_pod_satisfies_pod_security_restricted(helm: Helm, kind: str) -> None:
    made = only(helm.objects(), kind)
    pod = made["spec"]["template"]["spec"] if kind == "Deployment" else made["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    (one,) = pod["containers"]
    assert one["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def test_no_role_reaches_secrets_or_other_pods(helm: Helm) -> None:
    for o in helm.objects():
        for rule in o.get("rules") or []:
            assert "*" not in [*rule["apiGroups"], *rule["resources"], *rule["verbs"]]
            assert not {"secrets", "pods/exec", "pods/attach"} & set(rule["resources"])


@pytest.mark.parametrize(
    ("setting", "kinds"), [("crds.enabled=false", 0), ("crds.enabled=true", 1)]
)
def test_the_crd_comes_when_it_is_wanted(helm: Helm, setting: str, kinds: int) -> None:
    found = [o for o in helm.objects(setting) if o["kind"] == "CustomResourceDefinition"]
    assert len(found) == kinds


@pytest.mark.parametrize(
    ("role", "verbs"),
    [("edit", {"create", "update", "patch", "delete"}), ("view", {"get", "list", "watch"})],
)
def test_users_get_rights_on_runs_by_the_clusters_own_roles(
    helm: Helm, role: str, verbs: set[str]
) -> None:
    made = only(helm.objects(), "ClusterRole", f"x-trainsync-operator-{role}")
    labels = {name for name in made["metadata"]["labels"] if "aggregate-to" in name}
    assert labels == {f"rbac.authorization.k8s.io/aggregate-to-{role}"}
    (rule,) = made["rules"]
    # The operator and the monitor write the status.
    assert rule["resources"] == ["trainingruns", "trainingruns/scale"]
    assert set(rule["verbs"]) == verbs


@pytest.mark.parametrize("setting", ["crds.enabled=false", "crds.aggregateRoles=false"])
def test_without_the_crd_or_by_choice_users_get_no_rights(helm: Helm, setting: str) -> None:
    objects = helm.objects(setting, 'watchNamespaces=["a"]')
    assert "ClusterRole" not in [o["kind"] for o in objects]


@pytest.mark.parametrize(("keep", "policy"), [("true", "keep"), ("false", None)])
def test_the_crd_is_kept_when_it_is_wanted(helm: Helm, keep: str, policy: str | None) -> None:
    crd = only(helm.objects(f"crds.keep={keep}"), "CustomResourceDefinition")
    assert crd["metadata"].get("annotations", {}).get("helm.sh/resource-policy") == policy


def test_values_that_are_set_to_null_are_as_good_as_empty(helm: Helm) -> None:
    empty = {"watchNamespaces", "commonLabels", "podLabels", "nodeSelector", "extraEnv"}
    nothing = [f"{name}=null" for name in empty]
    rules = ("prometheusRule.enabled=true", "prometheusRule.alertLabels=null")
    rules = (*rules, "prometheusRule.disabledAlerts=null")
    assert helm.objects(*nothing, *rules) == helm.objects("prometheusRule.enabled=true")


def test_a_digest_wins_over_a_tag(helm: Helm) -> None:
    digest = f"sha256:{'0' * 64}"
    settings = (f'image.digest="{digest}"', 'image.tag="1"', f'monitorImage.digest="{digest}"')
    operator = container(helm.objects(*settings))
    assert operator["image"] == f"localhost/trainsync/operator@{digest}"
    assert f"--monitor-image=localhost/trainsync/monitor@{digest}" in operator["args"]


def test_the_pod_is_placed_and_fitted_as_the_values_say(everything: list[Object]) -> None:
    pod, operator = pod_spec(everything), container(everything)
    values = yaml.safe_load(EVERYTHING.read_text())
    for name in ("nodeSelector", "tolerations", "affinity", "priorityClassName"):
        assert pod[name] == values[name]
    assert pod["volumes"] == values["extraVolumes"]
    assert pod["imagePullSecrets"] == [{"name": "registry"}]
    assert pod["securityContext"]["runAsUser"] == 1000
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert operator["env"] == values["extraEnv"]
    assert operator["volumeMounts"] == values["extraVolumeMounts"]
    assert operator["resources"] == values["resources"]
    assert {
        "--workers=8",
        "--monitor-pull-secret=monitors",
        "--monitor-image-allowed=registry.example/rl/",
    } <= set(operator["args"])


def test_replicas_are_spread_by_the_operators_own_labels(everything: list[Object]) -> None:
    selector = only(everything, "Deployment")["spec"]["selector"]
    (constraint,) = pod_spec(everything)["topologySpreadConstraints"]
    assert constraint["labelSelector"] == selector
    budget = only(everything, "PodDisruptionBudget")["spec"]
    assert budget == {"minAvailable": "50%", "selector": selector}


def test_a_budget_without_min_available_bounds_what_a_drain_takes(helm: Helm) -> None:
    budget = only(helm.objects("podDisruptionBudget.enabled=true"), "PodDisruptionBudget")
    assert budget["spec"]["maxUnavailable"] == 1
    assert "minAvailable" not in budget["spec"]


def test_a_budget_with_null_is_as_good_as_without(helm: Helm) -> None:
    settings = ("podDisruptionBudget.enabled=true", "podDisruptionBudget.minAvailable=null")
    assert only(helm.objects(*settings), "PodDisruptionBudget")["spec"]["maxUnavailable"] == 1


@pytest.mark.parametrize("amount", ["maxUnavailable", "minAvailable"])
def test_a_budget_of_none_is_an_amount(helm: Helm, amount: str) -> None:
    setting = json.dumps({"enabled": True, amount: 0})
    spec = only(helm.objects(f"podDisruptionBudget={setting}"), "PodDisruptionBudget")["spec"]
    assert {name: value for name, value in spec.items() if name != "selector"} == {amount: 0}


def test_labels_and_annotations_may_be_what_kubernetes_takes(helm: Helm) -> None:
    labels = {"team": "", "example.com/Team_1": "A.b-c_9", "x" * 63: "y" * 63}
    annotations = {"Example.com/note": "any text: {}, at all"}
    made = only(
        helm.objects(
            f"podLabels={json.dumps(labels)}", f"podAnnotations={json.dumps(annotations)}"
        ),
        "Deployment",
    )
    meta = made["spec"]["template"]["metadata"]
    assert labels.items() <= meta["labels"].items()
    assert annotations.items() <= meta["annotations"].items()


def test_common_labels_are_on_everything_and_replace_nothing(helm: Helm) -> None:
    labels = {"team": "rl", "app.kubernetes.io/name": "other"}
    for o in helm.objects(f"commonLabels={json.dumps(labels)}"):
        if o["kind"] != "Pod":  # of `helm test`, deleted after the test
            assert o["metadata"]["labels"]["team"] == "rl", o["kind"]
            assert o["metadata"]["labels"]["app.kubernetes.io/name"] == "trainsync-operator"


def test_labels_of_the_pod_cannot_take_it_from_its_selector(helm: Helm) -> None:
    labels = json.dumps({"app.kubernetes.io/name": "other"})
    made = only(helm.objects(f"podLabels={labels}"), "Deployment")["spec"]
    assert made["selector"]["matchLabels"].items() <= made["template"]["metadata"]["labels"].items()


def test_an_account_of_yours_is_bound_and_not_made(helm: Helm) -> None:
    account = json.dumps({"create": False, "name": "mine"})
    objects = helm.objects(f"serviceAccount={account}")
    assert "ServiceAccount" not in [o["kind"] for o in objects]
    assert pod_spec(objects)["serviceAccountName"] == "mine"
    for kind in ("ClusterRoleBinding", "RoleBinding"):
        assert only(objects, kind)["subjects"][0]["name"] == "mine"


def test_the_operator_and_every_monitor_are_scraped(everything: list[Object]) -> None:
    service = only(everything, "Service")
    own = only(everything, "ServiceMonitor", "ts")["spec"]
    assert own["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert [e["port"] for e in own["endpoints"]] == [p["name"] for p in service["spec"]["ports"]]
    assert own["endpoints"][0]["interval"] == "15s"
    runs = only(everything, "ServiceMonitor", "ts-runs")["spec"]
    assert runs["namespaceSelector"] == {"any": True}
    assert runs["endpoints"][0]["port"] == "http"


def test_the_test_pod_reaches_the_operator_through_its_policy(everything: list[Object]) -> None:
    (ingress,) = only(everything, "NetworkPolicy")["spec"]["ingress"]
    test = only(everything, "Pod")["metadata"]["labels"]
    assert {"podSelector": {"matchLabels": test}} in ingress["from"]
    operator = only(everything, "Deployment")["spec"]["selector"]["matchLabels"]
    assert not operator.items() <= test.items(), "the metrics Service would send to the test's pod"


def test_only_pods_of_runs_and_named_peers_reach_monitors_through_their_policy(helm: Helm) -> None:
    peer = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    setting = json.dumps({"enabled": True, "from": [peer]})
    objects = helm.objects('watchNamespaces=["a","b"]', f"networkPolicy.monitors={setting}")
    policies = [o for o in objects if o["kind"] == "NetworkPolicy"]
    assert [o["metadata"]["namespace"] for o in policies] == ["a", "b"]
    target = Target(make_run(), 0, 0, MonitorSettings("m"))
    monitor = monitor_deployment.build(target)["spec"]["template"]
    (port,) = monitor["spec"]["containers"][0]["ports"]
    ray = raycluster.build(target, target.run.spec.clusters[0])["spec"]["headGroupSpec"]["template"]
    for policy in (o["spec"] for o in policies):
        selected = policy["podSelector"]["matchLabels"].items()
        assert selected <= monitor["metadata"]["labels"].items()
        assert not selected <= ray["metadata"]["labels"].items()
        (ingress,) = policy["ingress"]
        assert ingress["ports"] == [{"port": port["name"], "protocol": "TCP"}]
        pods, other = ingress["from"]
        (expression,) = pods["podSelector"]["matchExpressions"]
        assert expression == {"key": names.LABEL_RUN, "operator": "Exists"}
        assert names.LABEL_RUN in ray["metadata"]["labels"]
        assert other == peer
        assert [[p["port"] for p in rule["ports"]] for rule in policy["egress"]] == [
            [53, 53],
            [443, 6443],
        ]


def test_every_dashboard_lies_in_a_config_map_of_its_own(everything: list[Object]) -> None:
    files = {file.name: file.read_text() for file in (CHART / "dashboards").glob("*.json")}
    assert files
    maps = [o for o in everything if o["kind"] == "ConfigMap"]
    assert {name: text for o in maps for name, text in o["data"].items()} == files
    for o in maps:
        assert o["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert o["metadata"]["annotations"] == {"grafana_folder": "Training"}
        assert o["metadata"]["namespace"] == "monitoring"


def test_dashboards_for_the_grafana_operator_hold_the_same_json(helm: Helm) -> None:
    setting = json.dumps({"enabled": True, "kind": "GrafanaDashboard"})
    made = [o for o in helm.objects(f"dashboards={setting}") if o["kind"] == "GrafanaDashboard"]
    files = sorted(file.read_text() for file in (CHART / "dashboards").glob("*.json"))
    assert sorted(o["spec"]["json"] for o in made) == files


def rules_of(objects: list[Object]) -> list[dict[str, Any]]:
    groups = only(objects, "PrometheusRule")["spec"]["groups"]
    return [rule for group in groups for rule in group["rules"]]


def rule_files() -> list[dict[str, Any]]:
    files = [yaml.safe_load(file.read_text()) for file in sorted((CHART / "rules").glob("*.yaml"))]
    return [rule for file in files for group in file["groups"] for rule in group["rules"]]


def test_every_rule_is_brought_with_the_labels_asked_for(everything: list[Object]) -> None:
    for rule in (made := rules_of(everything)):
        if "alert" in rule:
            assert rule["labels"]["team"] == "rl"
            link = rule["annotations"]["runbook_url"]
            assert link.startswith("https://runbooks.example/trainsync/")
            assert link != "https://runbooks.example/trainsync/"
    names = [rule.get("alert") or rule["record"] for rule in made]
    assert names == [rule.get("alert") or rule["record"] for rule in rule_files()]


def test_an_alert_can_be_left_out(helm: Helm) -> None:
    alerts = [rule["alert"] for rule in rule_files() if "alert" in rule]
    assert alerts
    setting = json.dumps({"enabled": True, "disabledAlerts": alerts[:1]})
    made = rules_of(helm.objects(f"prometheusRule={setting}"))
    assert [rule["alert"] for rule in made if "alert" in rule] == alerts[1:]
