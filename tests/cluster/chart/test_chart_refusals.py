"""helm refuses wrong values, and names the value and the reason. Needs no cluster."""

import pytest

from tests.cluster.chart.helm import Helm

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(120)]

WRONG = [
    ("replica=2", "at '': additional properties 'replica' not allowed"),
    ('replicas="2"', "at '/replicas': got string, want integer"),
    ("replicas=9", "at '/replicas': maximum: got 9, want 5"),
    ('image.repository="registry.example/op:tag"', "at '/image/repository': 'registry.example/op"),
    ('image.tag="not a tag"', "at '/image/tag': 'not a tag' does not match"),
    ('image.digest="sha256:short"', "at '/image/digest': 'sha256:short' does not match"),
    ('image.pullPolicy="Sometimes"', "at '/image/pullPolicy': value must be one of 'Always', "),
    ('image.name="operator"', "at '/image': additional properties 'name' not allowed"),
    ('monitorImage.pullSecrets="one"', "at '/monitorImage/pullSecrets': got string, want array"),
    ('monitorImage.allowed="one"', "at '/monitorImage/allowed': got string, want array"),
    (
        'monitorImage.allowed=["own/monitor:1"]',
        "at '/monitorImage/allowed/0': 'own/monitor:1' does",
    ),
    ('watchNamespaces="default"', "at '/watchNamespaces': got string, want array"),
    ('watchNamespaces=["Not-One"]', "at '/watchNamespaces/0': 'Not-One' does not match"),
    ('watchNamespaces=["a","a"]', "at '/watchNamespaces': items at 0 and 1 are equal"),
    ('logLevel="verbose"', "at '/logLevel': value must be one of 'debug', 'info', "),
    ("workers=0", "at '/workers': minimum: got 0, want 1"),
    ("metrics.port=80", "at '/metrics/port': minimum: got 80"),
    ("workers=null", "at '': missing property 'workers'"),
    ('crds.keep="yes"', "at '/crds/keep': got string, want boolean"),
    ('crds.aggregateRoles="yes"', "at '/crds/aggregateRoles': got string, want boolean"),
    ("serviceAccount.create=false", "at '/serviceAccount/name': minLength: got 0, want 1"),
    ('podAnnotations={"number":1}', "at '/podAnnotations/number': got number, want string"),
    ("podSecurityContext.runAsUser=0", "at '/podSecurityContext/runAsUser': minimum: got 0"),
    ("securityContext.privileged=true", "additional properties 'privileged' not allowed"),
    ("securityContext.allowPrivilegeEscalation=true", "Escalation': value must be false"),
    ('resources.request={"cpu":1}', "at '/resources': additional properties 'request' not"),
    ('tolerations=[{"effect":"NoRun"}]', "at '/tolerations/0/effect': value must be one of"),
    ('affinity={"podAfinity":{}}', "at '/affinity': additional properties 'podAfinity' not"),
    ('topologySpreadConstraints=[{"maxSkew":1}]', "missing properties 'topologyKey', 'whenUn"),
    ('extraEnv=[{"value":"1"}]', "at '/extraEnv/0': missing property 'name'"),
    ('extraVolumes=[{"name":"of-nothing"}]', "at '/extraVolumes/0': minProperties: got 1"),
    ('podDisruptionBudget.maxUnavailable="half"', "maxUnavailable': 'half' does not match"),
    (
        'podDisruptionBudget={"enabled":true,"maxUnavailable":null,"minAvailable":null}',
        "podDisruptionBudget needs maxUnavailable or minAvailable: both are null",
    ),
    ('commonLabels={"a b":"c"}', "at '/commonLabels': additional properties 'a b' not"),
    ('podLabels={"team":"r l"}', "at '/podLabels/team': 'r l' does not match"),
    (f'serviceMonitor.labels={{"team":"{"x" * 64}"}}', "at '/serviceMonitor/labels/team': 'xxx"),
    ('nodeSelector={"a/b/c":"d"}', "at '/nodeSelector': additional properties 'a/b/c' not"),
    ('podAnnotations={"a b":"c"}', "at '/podAnnotations': additional properties 'a b' not"),
    ('prometheusRule.alertLabels={"a-b":"c"}', "at '/prometheusRule/alertLabels': additional prop"),
    ("networkPolicy.apiServerPorts=[]", "at '/networkPolicy/apiServerPorts': minItems: got 0"),
    ("networkPolicy.monitors.enabled=true", "networkPolicy.monitors needs watchNamespaces: the"),
    ('networkPolicy.monitors.from=[{"pods":{}}]', "at '/networkPolicy/monitors/from/0': addition"),
    ('serviceMonitor.interval="1 minute"', "at '/serviceMonitor/interval': '1 minute' does not"),
    ('podMonitor.enabled="true"', "at '/podMonitor/enabled': got string, want boolean"),
    ('dashboards.kind="Secret"', "at '/dashboards/kind': value must be one of 'ConfigMap', "),
    (
        'prometheusRule={"enabled":true,"disabledAlerts":["NoSuch"]}',
        'prometheusRule.disabledAlerts names "NoSuch", which is no alert of this chart',
    ),
]


@pytest.mark.parametrize(("setting", "sentence"), WRONG, ids=[setting for setting, _ in WRONG])
def test_a_wrong_value_is_refused_with_a_sentence(helm: Helm, setting: str, sentence: str) -> None:
    assert sentence in helm.refusal(setting)
