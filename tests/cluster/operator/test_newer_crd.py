"""The operator with a CRD of a later release, whose fields it does not know."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from trainsync.api import names

from tests.cluster.conftest import CRD_FILE, Kubectl, wait_until
from tests.cluster.manifests import minimal
from tests.cluster.operator.operator_process import running_operator
from tests.cluster.operator.test_children import NO_IMAGE, create, delete
from tests.cluster.ray_runs import status

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.timeout(300),
    pytest.mark.usefixtures("crd"),
]

CRD = f"{names.PLURAL}.trainsync.dev"
LATER: dict[str, Any] = {"type": "string", "default": "Later"}
PROBE = json.dumps(minimal("probe") | {"spec": {**minimal()["spec"], "sync": {}}})
SPEC = "/spec/versions/0/schema/openAPIV3Schema/properties/spec/properties"


@pytest.fixture
def newer_crd(kubectl: Kubectl) -> Iterator[None]:
    """The CRD with a field of its own, and one in a part of the spec, both with defaults."""
    patch = [
        {"op": "add", "path": f"{SPEC}/futureMode", "value": LATER},
        {"op": "add", "path": f"{SPEC}/sync/properties/futureMode", "value": LATER},
    ]
    kubectl("patch", "crd", CRD, "--type=json", "-p", json.dumps(patch))
    try:
        yield
    finally:
        kubectl("replace", "-f", str(CRD_FILE))


def told(ns: Kubectl, run: str) -> list[dict[str, Any]]:
    events = [e for e in ns.list("events") if e["involvedObject"]["name"] == run]
    return [event for event in events if event["reason"] == "FieldsIgnored"]


def test_a_run_with_defaults_of_a_newer_crd_is_reconciled_and_they_are_named_once(
    namespace: Kubectl, newer_crd: None, tmp_path: Path
) -> None:
    with running_operator(namespace, tmp_path, NO_IMAGE, leader_elect=False) as operator:

        def defaulted() -> bool:
            made = namespace.run("create", "-f", "-", "--dry-run=server", "-o", "json", stdin=PROBE)
            return "Later" in made.stdout

        wait_until("the API server fills the new fields in", defaulted)
        found = create(namespace, "older")
        assert found["spec"]["futureMode"] == "Later", "the field is not in the run"
        wait_until("it says what it ignores", lambda: told(namespace, "older"))
        (event,) = told(namespace, "older")
        for field in ("spec.futureMode", "spec.sync.futureMode"):
            assert field in event["message"]

        suspend(namespace, True)
        wait_until("an edit is obeyed", lambda: status(namespace, "older")["phase"] == "Suspended")
        assert operator.stop() == 0
        operator.start()
        suspend(namespace, False)
        again = "the next operator goes on"
        wait_until(again, lambda: namespace.get("raycluster", "older-main-1"))
        (event,) = told(namespace, "older")
        assert event.get("count", 1) == 1, "it is said again and again"
        delete(namespace, "older")


def suspend(ns: Kubectl, truth: bool) -> None:
    patch = json.dumps({"spec": {"suspend": truth}})
    ns("patch", "trainingrun", "older", "--type=merge", "-p", patch)
