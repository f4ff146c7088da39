"""What comes after its save was committed, or changed after it was checked."""

import re
from dataclasses import replace
from pathlib import Path

from trainsync.api.protocol import FailureReport, ParticipantRef, ReceiptHint, SaveState
from trainsync.monitor.core.core import MonitorCore
from trainsync.monitor.server.metrics import MonitorMetrics
from trainsync.storage.saves import receipts

from tests.unit.monitor.core.cores import Start
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
    write,
    write_all,
)


def counted(core: MonitorCore, metrics: MonitorMetrics) -> float:
    text = metrics.render(core.view(), None, lease_held=True)[0].decode()
    found = re.findall(
        r"^trainsync_checkpoint_late_parts_total\{.*checkpoint.*\} (.*)$", text, re.M
    )
    assert len(found) == 1
    return float(found[0])


def test_a_part_that_was_not_registered_and_comes_late_is_an_error(
    start: Start, tmp_path: Path, clock: Clock
) -> None:
    metrics = MonitorMetrics("team", "tiny")
    core = start(observer=metrics)
    core.saves.register(FIRST, request(1, ranks=1))
    write(tmp_path, FIRST, 1, 0)
    core.tick()
    assert core.view().checkpoint.last_error is None
    write(tmp_path, FIRST, 1, 1)
    who = ParticipantRef(component="model", rank=1)
    core.saves.receipt_hint(FIRST, ReceiptHint(kind=CHECKPOINT, step=1, participant=who))
    assert "committed without model.1" in str(core.view().checkpoint.last_error)
    assert core.saves.save_status(FIRST, CHECKPOINT, 1).state is SaveState.COMMITTED
    clock.go(31)
    core.tick()  # found again by the sweep, and counted once
    assert counted(core, metrics) == 1
    core.saves.register(FIRST, request(2))
    write_all(tmp_path, FIRST, 2)
    core.tick()
    assert core.view().checkpoint.last_error is None


def test_without_a_hint_it_is_found_on_the_disk(start: Start, tmp_path: Path, clock: Clock) -> None:
    core = start()
    core.saves.register(FIRST, request(1, ranks=1))
    write(tmp_path, FIRST, 1, 0)
    core.tick()
    core = start(claim=None)
    core.tick()
    write(tmp_path, FIRST, 1, 0)  # twice, and registered: no error
    write(tmp_path, FIRST, 1, 1)
    clock.go(31)
    core.tick()
    assert "committed without model.1:" in str(core.view().checkpoint.last_error)
    assert not directory(tmp_path, FIRST, 1).receipts.exists()


def test_a_file_that_changes_after_its_check_is_not_committed(start: Start, tmp_path: Path) -> None:
    core = start()
    core.saves.register(FIRST, request(1))
    write(tmp_path, FIRST, 1, 0)
    core.tick()
    file = directory(tmp_path, FIRST, 1).files / "actor/checkpoint_rank_0.pt"
    other = file.with_name("other")
    other.write_bytes(bytes(file.stat().st_size))
    other.replace(file)
    write(tmp_path, FIRST, 1, 1)
    core.tick()
    status = core.saves.save_status(FIRST, CHECKPOINT, 1)
    assert status.state is SaveState.ABORTED
    assert "digest" in str(status.error)


def test_a_component_that_some_ranks_alone_save_commits(start: Start, tmp_path: Path) -> None:
    """An actor on two of three ranks, say, while the third has a critic."""
    core = start()
    core.saves.register(FIRST, request(1))
    for rank in range(2):
        path = f"actor/model_world_size_3_rank_{rank}.pt"
        entry = stage(tmp_path, FIRST, 1, rank, path=path)
        record = replace(receipt(FIRST, 1, rank, CHECKPOINT, entry), world_size=3)
        receipts.write_receipt(directory(tmp_path, FIRST, 1), record)
    core.tick()
    assert core.saves.save_status(FIRST, CHECKPOINT, 1).state is SaveState.COMMITTED


def test_an_older_attempts_later_step_does_not_hide_an_abort(start: Start, tmp_path: Path) -> None:
    core = start()
    for step, kind in ((5, CHECKPOINT), (7, STATE_DICT)):
        core.saves.register(FIRST, request(step, kind))
        write_all(tmp_path, FIRST, step, kind)
        core.tick()
    core.claim(SECOND, "main", None)
    core.saves.register(SECOND, request(6, STATE_DICT))
    who = ParticipantRef(component="model", rank=0)
    core.saves.failure(
        SECOND, FailureReport(kind=STATE_DICT, step=6, participant=who, error="boom")
    )
    assert "boom" in str(core.view().checkpoint.last_error)
