"""A missing registration is reported long before the save's deadline, and at the end."""

import logging
from pathlib import Path

import pytest
from trainsync.api.protocol import SaveState
from trainsync.monitor.client.local import LocalMonitorClient

from tests.unit.monitor.core.cores import Start
from tests.unit.monitor.saves import CHECKPOINT, FIRST, Clock, request, write, write_all


def test_after_ten_seconds_the_status_reports_the_missing_registration(
    start: Start, tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    core = start()
    write_all(tmp_path, FIRST, 1)
    core.tick()
    clock.go(9)
    core.tick()
    assert core.view().checkpoint.last_error is None
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            clock.go(2)
            core.tick()
    assert "2 parts are written, but no process registered" in str(
        core.view().checkpoint.last_error
    )
    assert caplog.text.count("no process registered it") == 1
    core.saves.register(FIRST, request(1))
    assert core.saves.save_status(FIRST, CHECKPOINT, 1).state is SaveState.COMMITTED
    assert core.view().checkpoint.last_error is None


def test_a_local_monitor_names_what_it_leaves_unfinished(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    client = LocalMonitorClient(tmp_path, attempt=0, incarnation=FIRST.incarnation)
    client.claim("local")
    for step in (1, 2):
        client.register(request(step))
        write(tmp_path, FIRST, step, 0)
    write_all(tmp_path, FIRST, 2)
    write_all(tmp_path, FIRST, 3)
    with caplog.at_level(logging.WARNING):
        client.close()
    assert "checkpoint 1 of attempt 0, lacks model.1" in caplog.text
    assert "checkpoint 3 of attempt 0, not registered" in caplog.text
    assert "checkpoint 2 of" not in caplog.text
