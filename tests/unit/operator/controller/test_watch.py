"""Which events wake the operator, and what its metrics and logs show."""

import dataclasses
import json
import logging
from typing import Any

import kopf
import pytest
from trainsync.kube.logging import JsonFormatter
from trainsync_operator.controller import watch
from trainsync_operator.controller.watch import Change, RunFilter
from trainsync_operator.kube.kinds import CHILDREN, POD
from trainsync_operator.kube.logging import about, subject
from trainsync_operator.reconcile import status
from trainsync_operator.reconcile.reconcile import Key
from trainsync_operator.reconcile.run import State

from tests.unit.operator.support import START, healthy, make_run, raw_run

KEY = Key("team", "tiny")


def matters(run_filter: RunFilter, raw: dict[str, Any], deleted: bool = False) -> bool:
    return run_filter.seen(KEY, raw, deleted) is not Change.NONE


def test_a_run_matters_when_it_is_first_seen_and_when_its_spec_changes() -> None:
    run_filter, raw = RunFilter(), raw_run()
    assert matters(run_filter, raw)
    assert not matters(run_filter, raw)
    raw["metadata"]["generation"] = 2
    assert matters(run_filter, raw)


def test_the_monitors_writes_do_not_matter_and_the_operators_own_part_does() -> None:
    run_filter, raw = RunFilter(), raw_run()
    raw["status"] = status.build(make_run(), State(begun=True), healthy(), START)
    assert matters(run_filter, raw)
    healthy_condition = {"type": "CheckpointHealthy", "status": "True"}
    raw["status"] = {
        **raw["status"],
        "progress": {"step": 5},
        "checkpoint": {"retained": [1]},
        "weights": {"lag": 2},
        "conditions": [*raw["status"]["conditions"], healthy_condition],
    }
    raw["metadata"]["resourceVersion"] = "99"
    assert not matters(run_filter, raw)
    raw["status"]["attempt"] = 7
    assert matters(run_filter, raw)


def test_an_edit_is_told_apart_from_what_the_operator_wrote() -> None:
    run_filter, raw = RunFilter(), raw_run()
    assert run_filter.seen(KEY, raw, False) is Change.EDIT
    raw["status"] = status.build(make_run(), State(begun=True), healthy(), START)
    assert run_filter.seen(KEY, raw, False) is Change.STATUS
    assert run_filter.seen(KEY, raw, False) is Change.NONE
    raw["metadata"]["generation"] = 2
    assert run_filter.seen(KEY, raw, False) is Change.EDIT
    assert run_filter.seen(KEY, raw, True) is Change.EDIT


def test_deletion_and_a_namesake_after_it_matter() -> None:
    run_filter, raw = RunFilter(), raw_run()
    assert matters(run_filter, raw)
    raw["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert matters(run_filter, raw)
    assert matters(run_filter, raw, deleted=True)
    assert matters(run_filter, raw_run(uid="second"))


def test_children_are_selected_on_the_server() -> None:
    selectors = watch.settings().watching.label_selectors
    for kind in (*CHILDREN, POD):
        assert selectors[watch.kopf_selector(kind)] == "trainsync.dev/run"


def test_kopf_is_kept_from_writing_anything() -> None:
    settings = watch.settings()
    assert not settings.posting.enabled
    assert settings.peering.standalone


def test_a_log_line_names_its_run() -> None:
    record = logging.LogRecord("x", logging.INFO, __file__, 1, "made %s", ("it",), None)
    formatter = JsonFormatter(subject)
    with about("team", "tiny"):
        line = json.loads(formatter.format(record))
    assert line["message"] == "made it"
    assert line["object"] == {"kind": "TrainingRun", "namespace": "team", "name": "tiny"}
    assert "object" not in json.loads(formatter.format(record))


@pytest.mark.parametrize(
    ("host", "server"),
    [
        ("10.96.0.1", "https://10.96.0.1:6443"),
        ("fd00::1", "https://[fd00::1]:6443"),
        ("", "https://kubernetes.default.svc"),
    ],
)
def test_a_pod_reaches_the_api_server_without_cluster_dns(
    monkeypatch: pytest.MonkeyPatch, host: str, server: str
) -> None:
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", host)
    monkeypatch.setenv("KUBERNETES_SERVICE_PORT", "6443")
    login = kopf.ConnectionInfo(server="https://kubernetes.default.svc", token="t")
    assert watch.by_address(login) == dataclasses.replace(login, server=server)


def test_the_monitors_answer_to_a_rollback_wakes_the_operator() -> None:
    run_filter, raw = RunFilter(), raw_run()
    raw["status"] = status.build(make_run(), State(begun=True), healthy(), START)
    assert matters(run_filter, raw)
    raw["status"]["checkpoint"] = {"rollback": {"step": 5, "state": "Accepted"}}
    assert matters(run_filter, raw)
    assert not matters(run_filter, raw)
