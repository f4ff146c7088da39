"""What a scrape shows of saves, leases and permits."""

import re
import shutil
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from trainsync import failpoints
from trainsync.api.protocol import (
    ExplorerReport,
    PermitRequest,
    ProgressReport,
    SaveState,
    WeightsReport,
)
from trainsync.monitor.core.core import CoreSettings, MonitorCore
from trainsync.monitor.server.metrics import MonitorMetrics
from trainsync.monitor.serving.roster import ServerRoster
from trainsync.storage.layout import RunDirectory
from trainsync.storage.leases import reading
from trainsync.storage.saves import receipts

from tests.unit.monitor.saves import (
    CHECKPOINT,
    FIRST,
    SECOND,
    STATE_DICT,
    Clock,
    directory,
    receipt,
    request,
    stage,
)

Labels = tuple[tuple[str, str], ...]


def core_of(
    root: Path, metrics: MonitorMetrics, servers: ServerRoster | None = None
) -> MonitorCore:
    return MonitorCore(
        RunDirectory(root),
        CoreSettings(),
        clock=lambda: datetime.now(UTC),
        observer=metrics,
        servers=servers,
    )


def scrape(metrics: MonitorMetrics, core: MonitorCore) -> dict[tuple[str, Labels], float]:
    text, _ = metrics.render(core.view(), core.last_report(), lease_held=True)
    found = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert (labels.pop("namespace"), labels.pop("run")) == ("team", "tiny")
            found[sample.name, tuple(sorted(labels.items()))] = sample.value
    return found


def write(root: Path, step: int, rank: int) -> int:
    entry = stage(root, FIRST, step, rank)
    record = replace(
        receipt(FIRST, step, rank, CHECKPOINT, entry),
        seconds=2.0, blocked_seconds=0.02, slot_seconds=0.01, queue_seconds=7.0, staged_bytes=1000,
    )  # fmt: skip
    receipts.write_receipt(directory(root, FIRST, step), record)
    return entry.bytes


def test_what_a_save_cost_is_counted_once_with_the_end_of_it(tmp_path: Path) -> None:
    metrics = MonitorMetrics("team", "tiny")
    core = core_of(tmp_path, metrics)
    core.claim(FIRST, "main", None)
    core.saves.register(FIRST, request(5))
    size = write(tmp_path, 5, 0)
    core.tick()
    of = (("kind", "checkpoint"),)
    assert scrape(metrics, core)["trainsync_checkpoint_in_flight", ()] == 1
    assert scrape(metrics, core)["trainsync_checkpoint_written_bytes_total", of] == 0
    size += write(tmp_path, 5, 1)
    for _ in range(2):
        core.tick()
    core = core_of(tmp_path, metrics)
    core.tick()
    assert core.saves.save_status(FIRST, CHECKPOINT, 5).state is SaveState.COMMITTED
    found = scrape(metrics, core)
    prefix = "trainsync_checkpoint"
    assert found[f"{prefix}_written_bytes_total", of] == size
    assert found[f"{prefix}_staged_bytes_total", of] == 2000
    # The ranks stood still at the same time.
    assert found[f"{prefix}_save_blocked_seconds_sum", of] == 0.02
    assert found[f"{prefix}_save_blocked_seconds_count", of] == 1
    parts = {"blocked": 0.04, "slot_wait": 0.02, "queue_wait": 14.0, "write": 4.0}
    for name, total in parts.items():
        assert found[f"{prefix}_{name}_seconds_sum", of] == total
        assert found[f"{prefix}_{name}_seconds_count", of] == 2
    assert found[f"{prefix}_commits_total", of] == 1
    assert found[f"{prefix}_in_flight", ()] == 0
    assert found[f"{prefix}_retained", of] == 1
    assert found[f"{prefix}_last_committed_step", of] == 5
    age = datetime.now(UTC).timestamp() - found[f"{prefix}_last_committed_timestamp_seconds", of]
    assert 0 <= age < 60
    assert found[f"{prefix}_staged_bytes_total", (("kind", "state_dict"),)] == 0


def test_all_saves_are_counted_also_beyond_what_status_lists(tmp_path: Path) -> None:
    metrics = MonitorMetrics("team", "tiny")
    core = core_of(tmp_path, metrics)
    core.claim(FIRST, "main", None)
    for step in range(20):
        core.saves.register(FIRST, request(step, STATE_DICT))
    assert scrape(metrics, core)["trainsync_checkpoint_in_flight", ()] == 20


def test_readers_and_writers_are_shown(tmp_path: Path) -> None:
    metrics = MonitorMetrics("team", "tiny")
    core = core_of(tmp_path, metrics)
    core.claim(FIRST, "main", None)
    core.saves.register(FIRST, request(5))
    for rank in range(2):
        write(tmp_path, 5, rank)
    core.tick()
    for holder in ("aaaaaaaa", "bbbbbbbb"):
        core.write_permit(FIRST, PermitRequest(holder=holder, scope=holder, label=""))
    with reading(RunDirectory(tmp_path), CHECKPOINT, 5, "merge"):
        again = core_of(tmp_path, MonitorMetrics("team", "tiny"))
        again.tick()
        assert scrape(metrics, again)["trainsync_checkpoint_reader_leases", ()] == 1
    found = scrape(metrics, core)
    assert found["trainsync_checkpoint_permits_held", ()] == 1
    assert found["trainsync_checkpoint_permits_waiting", ()] == 1
    assert found["trainsync_checkpoint_permit_wait_seconds_count", ()] == 1
    assert found["trainsync_checkpoint_permits_lost_total", ()] == 0


def test_weights_show_sync_times_and_explorers_behind_but_no_lag_of_the_absent(
    tmp_path: Path,
) -> None:
    metrics = MonitorMetrics("team", "tiny")
    core = core_of(tmp_path, metrics)
    core.claim(FIRST, "main", None)
    shown = {name for name, _ in scrape(metrics, core) if "weights" in name}
    assert all(name.startswith("trainsync_weights_sync_seconds_") for name in shown)
    explorers = [
        ExplorerReport(id="a", version=7, state="running"),
        ExplorerReport(id="b", version=3, state="lost", message="it was silent for 30.1 s"),
        ExplorerReport(id="c", version=5, state="stopped"),
    ]
    report = WeightsReport(
        trainer_version=9, method="nccl", last_duration_seconds=1.5, last_bytes=1000,
        syncs=4, losses={"silent": 1, "transfer": 0}, explorers=explorers,
        taken={"whole": 2000, "delta": 30}, resends=5,
    )  # fmt: skip
    core.report_weights(FIRST, report)
    found = scrape(metrics, core)
    prefix = "trainsync_weights"
    assert found[f"{prefix}_version", ()] == 9
    assert found[f"{prefix}_last_duration_seconds", ()] == 1.5
    assert found[f"{prefix}_last_bytes", ()] == 1000
    assert found[f"{prefix}_syncs_total", ()] == 4
    assert found[f"{prefix}_losses_total", (("cause", "silent"),)] == 1
    assert found[f"{prefix}_losses_total", (("cause", "transfer"),)] == 0
    assert found[f"{prefix}_bytes_total", (("way", "whole"),)] == 2000
    assert found[f"{prefix}_bytes_total", (("way", "delta"),)] == 30
    assert found[f"{prefix}_resends_total", ()] == 5
    for name, value in (("lag", 2), ("explorer_version", 7)):
        of = {labels: v for (n, labels), v in found.items() if n == f"{prefix}_{name}"}
        assert of == {(("explorer", "a"),): value}, "one of an absent explorer would hide it"
    states = {"running": 1, "lost": 1, "require_sync": 0, "stopped": 1}
    for state, count in states.items():
        assert found[f"{prefix}_explorers", (("state", state),)] == count
    assert found[f"{prefix}_sync_seconds_sum", ()] == 1.5
    core.report_weights(FIRST, report)
    assert scrape(metrics, core)[f"{prefix}_sync_seconds_count", ()] == 1, "no sync came to an end"
    weights = core.view().weights
    assert weights is not None
    assert [e.message for e in weights.explorers] == [None, "it was silent for 30.1 s", None]


def test_counters_are_0_before_the_first_event_so_that_it_is_an_increase(tmp_path: Path) -> None:
    metrics = MonitorMetrics("team", "tiny")
    core = core_of(tmp_path, metrics)
    before = scrape(metrics, core)
    for code in ("fenced", "unauthenticated", "claim_refused", "not_yet", "invalid"):
        metrics.refused(code)
    for doing in ("scan", "commit", "checkpoint pointer", "state_dict pointer"):
        metrics.io_error(doing)
    for outcome in ("written", "error", "conflict"):
        metrics.status_written(outcome)
    risen = {key: value - before[key] for key, value in scrape(metrics, core).items()}
    risen = {key: value for key, value in risen.items() if value}
    assert len(risen) == 12
    assert set(risen.values()) == {1}
    assert all(before[key] == 0 for key in risen)


def test_steps_that_are_trained_again_are_counted_as_repeated(tmp_path: Path) -> None:
    metrics = MonitorMetrics("team", "tiny")
    core = core_of(tmp_path, metrics)
    for owner, steps in ((FIRST, range(1, 19)), (SECOND, range(16, 21))):
        core.claim(owner, "main", None)
        for step in steps:
            core.report_progress(owner, ProgressReport(step=step))
    found = scrape(metrics, core)
    assert found["trainsync_run_steps_trained_total", ()] == 18 + 5
    assert found["trainsync_run_steps_repeated_total", ()] == 3


def test_the_oldest_open_save_and_the_room_on_the_volume_are_shown(tmp_path: Path) -> None:
    metrics = MonitorMetrics("team", "tiny")
    core = core_of(tmp_path, metrics)
    core.claim(FIRST, "main", None)
    core.saves.register(FIRST, request(5))
    core.tick()
    found = scrape(metrics, core)
    since = found["trainsync_checkpoint_oldest_in_flight_timestamp_seconds", ()]
    assert 0 <= datetime.now(UTC).timestamp() - since < 60
    capacity = found["trainsync_volume_capacity_bytes", ()]
    assert 0 < found["trainsync_volume_available_bytes", ()] <= capacity
    assert capacity == shutil.disk_usage(tmp_path).total


def test_a_commit_and_its_parts_carry_exemplars_where_the_scraper_takes_them(
    tmp_path: Path,
) -> None:
    metrics = MonitorMetrics("team", "tiny")
    core = core_of(tmp_path, metrics)
    core.claim(FIRST, "main", None)
    core.saves.register(FIRST, request(5))
    for rank in range(2):
        write(tmp_path, 5, rank)
    core.tick()
    accept = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
    text, content_type = metrics.render(core.view(), None, lease_held=True, accept=accept)
    assert content_type.startswith("application/openmetrics-text")
    assert '# {attempt="0",step="5"}' in text.decode()
    assert re.search(
        r'_write_seconds_bucket.* # {component="model",rank="1",step="5"}', text.decode()
    )
    plain, content_type = metrics.render(core.view(), None, lease_held=True)
    assert content_type.startswith("text/plain")
    assert b'step="5"' not in plain


def test_the_seconds_of_a_commit_hold_the_commit_itself(tmp_path: Path) -> None:
    clock, metrics = Clock(), MonitorMetrics("team", "tiny")

    def slow(phase: str) -> None:
        if phase == "promoting":
            clock.go(3)

    failpoints.enable(failpoints.COMMIT, slow)
    core = MonitorCore(
        RunDirectory(tmp_path),
        CoreSettings(),
        clock=clock,
        observer=metrics,
    )
    core.claim(FIRST, "main", None)
    core.saves.register(FIRST, request(5))
    for rank in range(2):
        write(tmp_path, 5, rank)
    core.tick()
    of = (("kind", "checkpoint"),)
    assert scrape(metrics, core)["trainsync_checkpoint_commit_seconds_sum", of] == 6
