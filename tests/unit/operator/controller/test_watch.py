"""Which events wake the operator, and what its metrics and logs show."""

import json
import logging
from typing import Any

from trainsync.api import names
from trainsync.kube.logging import JsonFormatter
from trainsync_operator.controller.watch import Change, RunFilter, Watches
from trainsync_operator.kube.kinds import POD, RUN
from trainsync_operator.kube.logging import about, fields, of_attempt, subject
from trainsync_operator.kube.store import Store
from trainsync_operator.reconcile import status
from trainsync_operator.reconcile.run import Key, State

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
    raw["status"]["checkpoint"] = {"stopSave": {"step": 5, "state": "committed"}}
    assert matters(run_filter, raw), "the operator waits for it"


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


def test_news_of_a_child_asks_for_its_run_and_news_of_others_for_nothing() -> None:
    asked: list[tuple[Key, bool]] = []

    def add(key: Key, *, edited: bool = False) -> None:
        asked.append((key, edited))

    watches = Watches(None, Store(), add, [None])  # type: ignore[arg-type]
    meta = {"namespace": "team", "name": "p", "labels": {names.LABEL_RUN: "tiny"}}
    watches.told(POD, {"metadata": meta}, False)
    watches.told(POD, {"metadata": {**meta, "labels": {}}}, False)
    watches.told(RUN, raw_run(), False)
    watches.told(RUN, raw_run(), False)
    watches.told(RUN, raw_run(), True)
    assert asked == [(KEY, False), (KEY, True), (KEY, True)]


def test_a_log_line_names_its_run_its_reconcile_and_its_attempt() -> None:
    record = logging.LogRecord("x", logging.INFO, __file__, 1, "made %s", ("it",), None)
    formatter = JsonFormatter(subject, fields)
    with about("team", "tiny"):
        first = json.loads(formatter.format(record))
        of_attempt(3)
        line = json.loads(formatter.format(record))
    with about("team", "tiny"):
        other = json.loads(formatter.format(record))
    assert line["message"] == "made it"
    assert line["object"] == {"kind": "TrainingRun", "namespace": "team", "name": "tiny"}
    assert line["reconcile"] == first["reconcile"] != other["reconcile"]
    assert ("attempt" in first, line["attempt"]) == (False, 3)
    outside = json.loads(formatter.format(record))
    assert not {"object", "reconcile", "attempt"} & outside.keys()


def test_the_monitors_answer_to_a_rollback_wakes_the_operator() -> None:
    run_filter, raw = RunFilter(), raw_run()
    raw["status"] = status.build(make_run(), State(begun=True), healthy(), START)
    assert matters(run_filter, raw)
    raw["status"]["checkpoint"] = {"rollback": {"step": 5, "state": "Accepted"}}
    assert matters(run_filter, raw)
    assert not matters(run_filter, raw)
