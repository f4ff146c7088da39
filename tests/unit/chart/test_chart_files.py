import base64
import json
import re
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from trainsync.api.spec import TrainingRunSpec
from trainsync_operator import rbac

REPOSITORY = Path(__file__).parents[3]
CHART = REPOSITORY / "charts" / "trainsync-operator"
CRD = "trainsync.dev_trainingruns.yaml"


def schema() -> dict[str, Any]:
    return dict(json.loads((CHART / "values.schema.json").read_text()))


def values() -> dict[str, Any]:
    return dict(yaml.safe_load((CHART / "values.yaml").read_text()))


def test_the_chart_carries_the_generated_crd() -> None:
    generated = (REPOSITORY / "crds" / CRD).read_text()
    assert (CHART / "files" / CRD).read_text() == generated, (
        f"cp crds/{CRD} charts/trainsync-operator/files/ (`make crd` does it)"
    )


def test_the_chart_has_the_version_of_the_package() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert chart["version"] == chart["appVersion"] == project["version"]


def test_the_defaults_satisfy_the_schema() -> None:
    jsonschema.validate(values(), schema())


def test_every_value_is_in_the_schema_and_has_a_default() -> None:
    def keys(part: dict[str, Any], path: str = "") -> set[str]:
        found = set()
        for name, value in part.get("properties", {}).items():
            if "$ref" in value:
                value = schema()["definitions"][value["$ref"].removeprefix("#/definitions/")]
            found |= {f"{path}{name}"} | keys(value, f"{path}{name}.")
        return found

    # What Kubernetes defines; the defaults name a part of it.
    theirs = ("resources", "podSecurityContext", "securityContext", "affinity")

    def defaults(part: dict[str, Any], path: str = "") -> set[str]:
        found = set()
        for name, value in part.items():
            found.add(f"{path}{name}")
            if isinstance(value, dict) and name not in (*theirs, "labels", "instanceSelector"):
                found |= defaults(value, f"{path}{name}.")
        return found

    inside = tuple(f"{name}." for name in (*theirs, "dashboards.instanceSelector"))
    wanted = {key for key in keys(schema()) if not key.startswith(("global", *inside))}
    assert defaults(values()) == wanted


def test_the_icon_is_the_picture_in_the_chart() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    head, _, data = chart["icon"].partition(",")
    assert head == "data:image/svg+xml;base64"
    assert base64.b64decode(data).strip() == (CHART / "files" / "icon.svg").read_bytes().strip()


def test_the_example_for_artifact_hub_is_a_valid_run() -> None:
    annotations = yaml.safe_load((CHART / "Chart.yaml").read_text())["annotations"]
    (example,) = yaml.safe_load(annotations["artifacthub.io/crdsExamples"])
    TrainingRunSpec.model_validate(example["spec"])


@pytest.mark.parametrize(
    "repository", ["registry.example:5000/team/operator", "operator", "registry.example/operator"]
)
def test_ordinary_image_repositories_are_accepted(repository: str) -> None:
    jsonschema.validate({**values(), "image": {"repository": repository, "tag": "1.0"}}, schema())


def test_the_chart_grants_what_the_operator_asks_for() -> None:
    granted = yaml.safe_load((CHART / "files" / "rbac.yaml").read_text())
    wanted = {
        "run": [rule.to_dict() for rule in rbac.RUN_RULES],
        "leaderWorkerSets": [rule.to_dict() for rule in rbac.LEADER_WORKER_SET_RULES],
        "priorityBoost": [rule.to_dict() for rule in rbac.PRIORITY_BOOST_RULES],
        "own": [rule.to_dict() for rule in rbac.OWN_RULES],
        "monitor": [rule.to_dict() for rule in rbac.MONITOR_RULES],
    }
    assert granted == wanted, "files/rbac.yaml differs from trainsync_operator/rbac.py"


def test_what_the_security_model_rules_out_is_no_right_of_the_operator() -> None:
    rights = {
        (name, verb)
        for rule in (
            *rbac.RUN_RULES,
            *rbac.LEADER_WORKER_SET_RULES,
            *rbac.PRIORITY_BOOST_RULES,
            *rbac.OWN_RULES,
        )
        for name in rule.resources
        for verb in rule.verbs
    }
    assert not {name for name, _ in rights} & {"secrets", "roles", "clusterroles", "pods/exec"}
    deletes = {name for name, verb in rights if verb == "delete"}
    of_servers = {"deployments", "leaderworkersets", "services", "poddisruptionbudgets"}
    assert deletes == {"trainingruns", "rayclusters", "rayjobs", "pods", *of_servers}


@pytest.mark.parametrize(
    "file",
    ["values.yaml", "templates/NOTES.txt", "../../docs/install.md", "../../docs/security.md"],
)
def test_every_page_on_the_operators_rights_recommends_namespaces(file: str) -> None:
    paragraphs = re.split(r"\n\s*\n", (CHART / file).read_text())
    assert any("ecommended" in p and "watchNamespaces" in p for p in paragraphs)
