"""Ranks side by side claim their attempt once, and learn together when that is not possible."""

from pathlib import Path

import pytest
import torch.distributed as dist
from trainsync import RunContext
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves.claims import LOCAL_UID, read_claims

from tests.distributed.ranks import run_ranks, values_of

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]


def join(directory: Path) -> tuple[int, str, int, int]:
    dist.init_process_group("gloo")
    with RunContext.from_env(directory) as context:
        coordinator = context.coordinator()
        dist.barrier()
        return context.attempt, context.incarnation, coordinator.rank, coordinator.world_size


def test_all_ranks_are_in_the_attempt_that_rank_0_claimed(tmp_path: Path) -> None:
    joined = values_of(run_ranks(join, tmp_path, world_size=3))
    assert [attempt for attempt, *_ in joined] == [0, 0, 0]
    assert len({incarnation for _, incarnation, *_ in joined}) == 1
    assert [(rank, world) for *_, rank, world in joined] == [(0, 3), (1, 3), (2, 3)]
    (claim,) = read_claims(RunDirectory(tmp_path), LOCAL_UID)
    assert claim.incarnation == joined[0][1]


def test_when_rank_0_cannot_claim_every_rank_says_why_and_none_hangs(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file where the run's directory should be")
    ranks = run_ranks(join, tmp_path / "run", seconds=60)
    assert [rank.exit_code for rank in ranks] == [1, 1]
    assert all("NotADirectoryError" in (rank.error or "") for rank in ranks), ranks
    assert "JoinError: rank 0 could not claim the attempt" in (ranks[1].error or "")
