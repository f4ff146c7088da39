"""A coordinator with a real monitor in this process and a real directory."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.checkpoint.errors import SaveAbortedError, SaveFailedError
from trainsync.monitor.client.local import LocalMonitorClient

from tests.unit.checkpoint.coordinator.coordinators import INCARNATION
from tests.waiting import eventually


@pytest.fixture
def monitor(tmp_path: Path) -> Iterator[LocalMonitorClient]:
    client = LocalMonitorClient(
        tmp_path / "run", attempt=0, incarnation=INCARNATION, tick_seconds=0.05
    )
    client.claim("local")
    yield client
    client.close()


@pytest.fixture
def coordinator(monitor: LocalMonitorClient, tmp_path: Path) -> Iterator[CheckpointCoordinator]:
    made = CheckpointCoordinator(monitor, tmp_path / "run", staging_timeout=30)
    yield made
    with contextlib.suppress(SaveFailedError, SaveAbortedError):
        made.wait_all(30)
    # Not joined: one that is only being started cannot be.
    eventually(lambda: not any(t.name.startswith("trainsync-tell-") for t in threading.enumerate()))
