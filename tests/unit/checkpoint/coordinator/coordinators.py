"""Helpers for tests of a coordinator: wait for a commit, and a save function that fails."""

import asyncio
from pathlib import Path

from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.checkpoint.save.registration import all_ranks

INCARNATION = "0123456789abcdef"


def commit(coordinator: CheckpointCoordinator, step: int, *components: str) -> None:
    participants = all_ranks(*components, world_size=coordinator.world_size)
    asyncio.run(
        coordinator.register_and_monitor(step, checkpoint_participants=participants, timeout=30)
    )


def explode(directory: Path) -> None:
    raise RuntimeError("the disk is on fire")
