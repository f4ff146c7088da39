"""A rank that is killed amid what all ranks do together: the others raise, and soon."""

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trainsync
from trainsync.checkpoint.errors import LoadFailedError
from trainsync.dist.errors import PeerLostError
from trainsync.engines.agree import PeerFailedError, on_all_ranks
from trainsync.engines.errors import TrainerRankFailedError
from trainsync.engines.trainer_ranks import trainer_ranks

from tests.distributed.ranks import run_ranks

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(180)]

SOON = 15.0


class Deadly:
    """A scheduler that is killed when it is restored."""

    def __init__(self, kills: bool) -> None:
        self._kills = kills

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self._kills:
            os.kill(os.getpid(), signal.SIGKILL)


def lose_a_rank(directory: str, victim: int) -> list[tuple[str, float]]:
    """What each thing that ranks do together raised in the survivors, and after how long."""
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    ctx = trainsync.RunContext.from_env(directory)
    coordinator = ctx.coordinator()
    model, scheduler = torch.nn.Linear(4, 4), Deadly(rank == victim)
    line = trainer_ranks(600.0)
    on_all_ranks(lambda: rank, "beginning")
    coordinator.save_async("model", model.state_dict(), 1)
    coordinator.save_async("extra_state", trainsync.training_state(scheduler=scheduler), 1)
    everyone = trainsync.all_ranks("model", "extra_state", world_size=world_size)
    if rank == 0:
        waiting = coordinator.register_and_monitor(1, checkpoint_participants=everyone)
        asyncio.run(waiting)
    on_all_ranks(lambda: rank, "saving")
    resume = ctx.resume()
    assert resume is not None
    raised = []
    for call, kind in (
        (lambda: trainsync.load_sharded(resume, model=model, scheduler=scheduler), LoadFailedError),
        (lambda: on_all_ranks(lambda: rank, "saving step 2"), PeerFailedError),
        (lambda: line.agree("", None, "publishing version 2", 600.0), TrainerRankFailedError),
    ):
        started = time.monotonic()
        with pytest.raises(PeerLostError) as error:
            call()
        assert isinstance(error.value, kind)
        raised.append((str(error.value), time.monotonic() - started))
    return raised


@pytest.mark.parametrize("victim", [2, 0])
def test_a_killed_rank_ends_every_agreement_of_the_others_within_15_seconds(
    tmp_path: Path, victim: int
) -> None:
    """Rank 0 is also the host of the store, which goes with it."""
    ranks = run_ranks(lose_a_rank, str(tmp_path), victim, world_size=3, seconds=120)
    assert ranks[victim].exit_code == -signal.SIGKILL
    for survivor in {0, 1, 2} - {victim}:
        assert ranks[survivor].error is None, ranks[survivor].error
        for message, seconds in ranks[survivor].value:
            assert ("rank 2" if victim else "the store of the process group is gone") in message
            assert seconds < SOON
