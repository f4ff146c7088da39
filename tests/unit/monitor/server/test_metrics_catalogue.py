"""A scrape has exactly the catalogue's metrics, in bounded numbers."""

import string
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from trainsync.api.metrics import Metric, MetricType
from trainsync.api.protocol import (
    ExplorerReport,
    PermitRequest,
    ProgressReport,
    ServerReport,
    WeightsReport,
)
from trainsync.api.spec import Role
from trainsync.api.status import AccountStatus, AccountUnit, RolePods
from trainsync.monitor.account.account import OF_ROLE, Account
from trainsync.monitor.ledger.saves import AbortCause, AbortReason, SaveKey
from trainsync.monitor.server.metrics import MonitorMetrics
from trainsync.monitor.server.metrics_catalogue import CATALOGUE, RUN_LABELS
from trainsync.monitor.serving.roster import ServerRoster
from trainsync.weights.counts import TransferKind
from trainsync_operator.metrics.catalogue import CATALOGUE as OPERATOR_CATALOGUE

from tests.unit.monitor.saves import CHECKPOINT, FIRST, STATE_DICT, request, write_all
from tests.unit.monitor.server.test_metrics import core_of

EVERY = CATALOGUE + OPERATOR_CATALOGUE
LOSSES = ("silent", "transfer", "not_ready", "quarantined", "refused")


def account() -> AccountStatus:
    """After a minute, in which every class of each role got some seconds."""
    pods = {role: RolePods(role=role.value, held=1) for role in Role}
    made = Account.begin("uid", AccountUnit.POD, 0.0)
    made.see_pods(pods, "Running", 0.0)
    for role, kinds in OF_ROLE.items():
        made.roles[role].settle(60.0, dict.fromkeys(kinds, 1.0))
    found = made.shown()
    assert found is not None
    return found


def full_scrape(root: Path) -> bytes:
    """A scrape of a monitor to which everything has happened, with as many names as are taken."""
    metrics = MonitorMetrics("team", "tiny")
    metrics.of_mirror().mirrored(1, 2.0)
    servers = ServerRoster()
    servers.tell_newest(2)
    core = core_of(root, metrics, servers)
    core.claim(FIRST, "main", None)
    for kind in (CHECKPOINT, STATE_DICT):
        core.saves.register(FIRST, request(5, kind))
        write_all(root, FIRST, 5, kind)
    core.tick()
    core.saves.register(FIRST, request(6))
    core.write_permit(FIRST, PermitRequest(holder="aaaaaaaa", scope="node", label=""))
    names = {f"metric_{number}": 1.0 for number in range(64)}
    for step in (1, 2):
        core.report_progress(FIRST, ProgressReport(step=step, total_steps=9, metrics=names))
    explorers = [
        ExplorerReport(id=f"e{number}", version=1, state="running") for number in range(256)
    ]
    core.report_weights(
        FIRST,
        WeightsReport(
            trainer_version=2,
            method="nccl",
            last_duration_seconds=0.5,
            last_bytes=10,
            syncs=1,
            losses=dict.fromkeys(LOSSES, 1),
            taken=dict.fromkeys(TransferKind, 1),
            resends=1,
            explorers=explorers,
        ),
    )
    for number in range(300):
        with servers.reporting(f"s{number}", ServerReport(servers="rollouts", ready=True)):
            pass
    metrics.aborted(SaveKey(FIRST, 6, CHECKPOINT), AbortCause(AbortReason.IO_ERROR, "full"))
    metrics.io_error("scan")
    for code in ("fenced", "invalid"):
        metrics.refused(code)
    metrics.status_written("written")
    view = replace(core.view(), account=account())
    text, _ = metrics.render(view, core.last_report(), lease_held=True)
    return text


def test_a_scrape_shows_what_the_catalogue_declares_and_nothing_else(tmp_path: Path) -> None:
    text = full_scrape(tmp_path).decode()
    families = text_string_to_metric_families(text)
    # The process turns these off; tests share their process with others.
    shown = {family.name: family for family in families if not family.name.endswith("_created")}
    assert set(shown) == {metric.name.removesuffix("_total") for metric in CATALOGUE}
    for metric in CATALOGUE:
        family = shown[metric.name.removesuffix("_total")]
        assert family.type == metric.type
        assert family.documentation == metric.meaning
        assert family.samples, f"{metric.name} has no sample"
        wanted = {*metric.label_names, *(label.name for label in RUN_LABELS)}
        assert set(family.samples[0].labels) - {"le"} == wanted
        for label in metric.labels:
            values = {sample.labels[label.name] for sample in family.samples}
            assert len(values) <= label.most


def test_a_monitor_with_all_explorers_and_metrics_that_are_taken_stays_small(
    tmp_path: Path,
) -> None:
    text = full_scrape(tmp_path)
    assert len([line for line in text.splitlines() if not line.startswith(b"#")]) < 2000


@pytest.mark.parametrize("metric", EVERY, ids=lambda metric: metric.name)
def test_names_follow_the_conventions_of_prometheus(metric: Metric) -> None:
    assert set(metric.name) <= {*string.ascii_lowercase, *string.digits, "_"}
    assert metric.name.startswith("trainsync_")
    assert metric.name.endswith("_total") == (metric.type is MetricType.COUNTER)
    base = metric.name.removesuffix("_total")
    if metric.unit in ("seconds", "bytes"):
        assert base.endswith(f"_{metric.unit}")
    for other in ("milliseconds", "_ms", "minutes_", "megabytes", "_mb", "_gb", "percent"):
        assert other not in base
    assert metric.meaning.endswith(".")
    if metric.type is MetricType.HISTOGRAM:
        assert list(metric.buckets) == sorted(set(metric.buckets))
        assert "_".join(metric.name.split("_")[-1:]) == "seconds"


def test_no_name_is_declared_twice() -> None:
    names = [metric.name for metric in EVERY]
    assert len(names) == len(set(names))
