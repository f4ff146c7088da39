"""What a scrape shows of saves, leases and permits."""

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families
from trainsync.api.protocol import ExplorerReport, PermitRequest, SaveState, WeightsReport
from trainsync.monitor.core import CoreSettings, MonitorCore
from trainsync.monitor.metrics import MonitorMetrics
from trainsync.storage import receipts
from trainsync.storage.layout import RunDirectory
from trainsync.storage.leases import reading

from tests.unit.monitor.saves import (
    CHECKPOINT,
    FIRST,
    STATE_DICT,
    directory,
    receipt,
    request,
    stage,
)

Labels = tuple[tuple[str, str], ...]


def core_of(root: Path, metrics: MonitorMetrics) -> MonitorCore:
    return MonitorCore(
        RunDirectory(root), CoreSettings(), clock=lambda: datetime.now(UTC), observer=metrics
    )


def scrape(metrics: MonitorMetrics, core: MonitorCore) -> dict[tuple[str, Labels], float]:
    text = metrics.render(core.view(), None, lease_held=True).decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def write(root: Path, step: int, rank: int) -> int:
    entry = stage(root, FIRST, step, rank)
    record = replace(
        receipt(FIRST, step, rank, CHECKPOINT, entry),
        seconds=2.0, blocked_seconds=0.02, queue_seconds=7.0, staged_bytes=1000,
    )  # fmt: skip
    receipts.write_receipt(directory(root, FIRST, step), record)
    return entry.bytes


def test_what_a_save_cost_is_counted_once_with_the_end_of_it(tmp_path: Path) -> None:
    metrics = MonitorMetrics()
    core = core_of(tmp_path, metrics)
    core.claim(FIRST, "main", None)
    core.register(FIRST, request(5))
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
    assert core.save_status(FIRST, CHECKPOINT, 5).state is SaveState.COMMITTED
    found = scrape(metrics, core)
    prefix = "trainsync_checkpoint"
    assert found[f"{prefix}_written_bytes_total", of] == size
    assert found[f"{prefix}_staged_bytes_total", of] == 2000
    for name, total in (("blocked", 0.04), ("queue_wait", 14.0), ("write", 4.0)):
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
    metrics = MonitorMetrics()
    core = core_of(tmp_path, metrics)
    core.claim(FIRST, "main", None)
    for step in range(20):
        core.register(FIRST, request(step, STATE_DICT))
    assert scrape(metrics, core)["trainsync_checkpoint_in_flight", ()] == 20


def test_readers_and_writers_are_shown(tmp_path: Path) -> None:
    metrics = MonitorMetrics()
    core = core_of(tmp_path, metrics)
    core.claim(FIRST, "main", None)
    core.register(FIRST, request(5))
    for rank in range(2):
        write(tmp_path, 5, rank)
    core.tick()
    for holder in ("aaaaaaaa", "bbbbbbbb"):
        core.write_permit(FIRST, PermitRequest(holder=holder, scope=holder, label=""))
    with reading(RunDirectory(tmp_path), CHECKPOINT, 5, "merge"):
        again = core_of(tmp_path, MonitorMetrics())
        again.tick()
        assert scrape(metrics, again)["trainsync_checkpoint_reader_leases", ()] == 1
    found = scrape(metrics, core)
    assert found["trainsync_checkpoint_permits_held", ()] == 1
    assert found["trainsync_checkpoint_permits_waiting", ()] == 1
    assert found["trainsync_checkpoint_permit_wait_seconds_count", ()] == 1
    assert found["trainsync_checkpoint_permits_lost_total", ()] == 0


def test_weights_show_what_a_sync_took_and_who_is_behind_but_no_lag_of_the_lost(
    tmp_path: Path,
) -> None:
    metrics = MonitorMetrics()
    core = core_of(tmp_path, metrics)
    core.claim(FIRST, "main", None)
    assert not [name for name, _ in scrape(metrics, core) if "weights" in name]
    explorers = [
        ExplorerReport(id="a", version=7, state="running"),
        ExplorerReport(id="b", version=3, state="lost", message="it was silent for 30.1 s"),
    ]
    report = WeightsReport(
        trainer_version=9, method="nccl", last_duration_seconds=1.5, last_bytes=1000,
        syncs=4, losses={"silent": 1, "transfer": 0}, explorers=explorers,
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
    assert [
        (labels, value) for (name, labels), value in found.items() if name == f"{prefix}_lag"
    ] == [((("explorer", "a"),), 2)]
    weights = core.view().weights
    assert weights is not None
    assert [e.message for e in weights.explorers] == [None, "it was silent for 30.1 s"]
