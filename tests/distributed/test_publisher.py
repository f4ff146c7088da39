"""`WeightPublisher` with method checkpoint: which state dicts two attempts of a run write."""

import asyncio
import os
from pathlib import Path

import pytest
import torch.distributed as dist
from trainsync import RunContext, WeightPublisher, all_ranks
from trainsync.api import env
from trainsync.api.protocol import SaveKind
from trainsync.storage.layout import RunDirectory
from trainsync.storage.manifest import committed_steps, read_manifest

from tests.distributed.fsdp_models import engine
from tests.distributed.ranks import run_ranks, values_of

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(180)]


def publish(directory: Path, first: int, last: int) -> list[bool]:
    """One attempt: whether each version's state dict was staged. A checkpoint follows the last."""
    os.environ[env.SYNC_METHOD] = "checkpoint"
    dist.init_process_group("gloo")
    with RunContext.from_env(directory) as context:
        coordinator = context.coordinator()
        staged = []
        made = engine("fsdp2")
        with WeightPublisher(context, made, coordinator) as publisher:
            for step in range(first, last + 1):
                report = publisher.publish(step)
                assert (report.version, dict(report.lost), dict(report.refused)) == (step, {}, {})
                staged.append(report.bytes > 0)
            coordinator.save_async("extra_state", {"step": last}, last)
            coordinator.wait_all(60)
        if coordinator.rank == 0:
            for step in range(first, last + 1):
                asyncio.run(coordinator.register_and_monitor(step, is_state_dict=True, timeout=60))
            asyncio.run(
                coordinator.register_and_monitor(
                    last,
                    checkpoint_participants=all_ranks("extra_state", world_size=2),
                    timeout=60,
                )
            )
        dist.barrier()
    return staged


def test_an_attempt_that_goes_on_keeps_the_state_dict_of_its_first_step(tmp_path: Path) -> None:
    assert values_of(run_ranks(publish, tmp_path, 2, 3)) == [[True, True]] * 2
    assert values_of(run_ranks(publish, tmp_path, 3, 4)) == [[False, True]] * 2
    run = RunDirectory(tmp_path)
    assert committed_steps(run, SaveKind.STATE_DICT) == [2, 3, 4]
    attempts = [read_manifest(run, SaveKind.STATE_DICT, step).manifest.attempt for step in (3, 4)]
    assert attempts == [0, 1]
