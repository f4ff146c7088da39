"""Old checkpoints are the monitor's business."""

import logging

import pytest
from trainsync.checkpoint.errors import CheckpointError
from trainsync.engines.checkpoints.retention import MonitoredRetention


def manager(max_to_keep: int | None) -> MonitoredRetention:
    made = MonitoredRetention()
    made.max_to_keep, made.previous_saved_paths = max_to_keep, []
    return made


def test_paths_are_remembered_up_to_verls_limit() -> None:
    retention = manager(2)
    for path in ("a", "b", "c"):
        retention.register_checkpoint(path, 2)
    assert retention.previous_saved_paths == ["b", "c"]


def test_a_limit_that_is_not_the_runs_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    retention = manager(5)
    with caplog.at_level(logging.WARNING):
        retention.register_checkpoint("a", 5)
        retention.register_checkpoint("b")
        assert caplog.messages == []
        retention.register_checkpoint("c", 3)
        retention.register_checkpoint("d", 3)
    assert len(caplog.messages) == 1
    assert "keep 3 checkpoints and the run keeps 5" in caplog.messages[0]


def test_nothing_is_removed() -> None:
    retention = manager(None)
    retention.ensure_checkpoint_capacity(2)
    with pytest.raises(CheckpointError, match="removed by the run's monitor"):
        retention.remove_previous_save_local_path(["a"])
