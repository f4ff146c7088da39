"""Commits of a model's shards."""

import asyncio
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.monitor.client.local import LocalMonitorClient

from tests.unit.checkpoint.merge.models import STEP, Commit


@pytest.fixture
def commit(tmp_path: Path) -> Iterator[Commit]:
    """Commits every rank's state of a model, with files beside it."""
    directory = tmp_path / "run"
    monitor = LocalMonitorClient(directory, attempt=0, incarnation="0123456789abcdef")
    monitor.claim("local")

    def do(
        states: Mapping[int, Any],
        attachments: dict[str, bytes],
        *,
        world_size: int | None = None,
        is_state_dict: bool = False,
    ) -> Path:
        world_size = world_size or len(states)
        for rank, state in states.items():
            coordinator = CheckpointCoordinator(
                monitor, directory, rank=rank, world_size=world_size
            )
            coordinator.save_sync(
                "model",
                state,
                STEP,
                is_state_dict=is_state_dict,
                attachments=attachments if rank == 0 else {},
            )
        everyone = [("model", rank) for rank in states]
        kind = "state_dict_participants" if is_state_dict else "checkpoint_participants"
        asyncio.run(
            coordinator.register_and_monitor(
                STEP, is_state_dict=is_state_dict, timeout=30, **{kind: everyone}
            )
        )
        return directory

    yield do
    monitor.close()
