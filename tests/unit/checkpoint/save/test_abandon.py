"""A process that must end reports its unwritten saves, so that no participant waits for them."""

import threading
from pathlib import Path

import torch
from trainsync import failpoints
from trainsync.api.protocol import ParticipantRef, SaveKind, SaveRequest, SaveState
from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.monitor.client.local import LocalMonitorClient


def test_what_is_not_written_is_aborted_with_the_reason_and_the_rest_commits(
    tmp_path: Path,
) -> None:
    client = LocalMonitorClient(tmp_path, attempt=0, incarnation="aaaaaaaa0", tick_seconds=0.02)
    client.claim("local")
    stuck, go = threading.Event(), threading.Event()

    def phase(name: str) -> None:
        if name == "opened" and stuck.is_set():
            assert go.wait(60)

    failpoints.enable(failpoints.SAVE, phase)
    coordinator = CheckpointCoordinator(client, tmp_path)
    who = [ParticipantRef(component="model", rank=0)]
    for step in (1, 2):
        client.register(SaveRequest(kind=SaveKind.CHECKPOINT, step=step, participants=who))
    state = {"weight": torch.ones(10)}
    coordinator.save_async("model", state, 1)
    coordinator.wait_all(60)
    assert coordinator.abandon("the end", 10) == []
    stuck.set()
    coordinator.save_async("model", state, 2)
    assert coordinator.abandon("the end", 10) == ["checkpoint of step 2, model.0"]
    first = client.save_status(SaveKind.CHECKPOINT, 1, wait_seconds=20)
    second = client.save_status(SaveKind.CHECKPOINT, 2, wait_seconds=20)
    assert first.state is SaveState.COMMITTED
    assert second.state is SaveState.ABORTED
    assert "the end" in str(second.error)
    go.set()  # the writer was not stopped: its late write has no effect
    client.close()
    assert not (tmp_path / "global_step_2").exists()
