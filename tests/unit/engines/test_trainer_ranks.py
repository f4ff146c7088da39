"""A rank alone agrees with itself; ranks together are in tests/distributed."""

import pytest
from trainsync.engines.publish.model_update_group import ModelUpdateGroup, fsdp_sync_weight_nccl
from trainsync.engines.trainer_ranks import TrainerRanks
from trainsync.weights.transports.broadcast.broadcaster import WeightBroadcaster
from trainsync.weights.transports.broadcast.deadlines import Deadlines


def fail() -> int:
    raise RuntimeError("no such luck")


def test_what_rank_0_decides_holds_and_its_error_is_its_own() -> None:
    ranks = TrainerRanks(10)
    assert (ranks.rank, ranks.world_size) == (0, 1)
    assert ranks.decide(lambda: 7, 10, "choosing") == 7
    with pytest.raises(RuntimeError, match="no such luck"):
        ranks.decide(fail, 10, "choosing")
    ranks.agree(None, 10, "going on")
    ranks.close()


def test_the_version_that_is_not_named_is_the_next_one() -> None:
    ranks = TrainerRanks(10)
    with WeightBroadcaster(0, "127.0.0.1", shared_memory=None) as broadcaster:
        group = ModelUpdateGroup(ranks, broadcaster, Deadlines())
        versions = [fsdp_sync_weight_nccl(None, group, step) for step in (None, None, 5, None)]
    ranks.close()
    assert [report.version for report in versions if report is not None] == [0, 1, 5, 6]


def test_only_rank_0_has_the_broadcaster() -> None:
    with pytest.raises(ValueError, match="rank 0 has no broadcaster; expected one on rank 0"):
        ModelUpdateGroup(TrainerRanks(10), None, Deadlines())
    other = TrainerRanks(10)
    other.rank = 1
    with (
        WeightBroadcaster(0, "127.0.0.1") as broadcaster,
        pytest.raises(ValueError, match="rank 1 has a broadcaster; expected one on rank 0"),
    ):
        ModelUpdateGroup(other, broadcaster, Deadlines())
