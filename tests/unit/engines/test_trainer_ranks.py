"""A rank alone agrees with itself; ranks together are in tests/distributed."""

import pytest
from trainsync.engines.publish.model_update_group import ModelUpdateGroup, fsdp_sync_weight_nccl
from trainsync.engines.trainer_ranks import trainer_ranks
from trainsync.weights.transports.broadcast.broadcaster import WeightBroadcaster
from trainsync.weights.transports.broadcast.deadlines import Deadlines


def fail() -> int:
    raise RuntimeError("no such luck")


def test_what_rank_0_decides_holds_and_its_error_is_its_own() -> None:
    ranks = trainer_ranks(10)
    assert (ranks.rank, ranks.world_size) == (0, 1)
    assert ranks.decide(lambda: 7, "choosing", 10) == 7
    with pytest.raises(RuntimeError, match="no such luck"):
        ranks.decide(fail, "choosing", 10)
    assert ranks.agree("mine", None, "going on", 10) == ["mine"]


def test_the_version_that_is_not_named_is_the_next_one() -> None:
    ranks = trainer_ranks(10)
    with WeightBroadcaster(0, "127.0.0.1", shared_memory=None) as broadcaster:
        group = ModelUpdateGroup(ranks, broadcaster, Deadlines())
        versions = [fsdp_sync_weight_nccl(None, group, step) for step in (None, None, 5, None)]
    assert [report.version for report in versions if report is not None] == [0, 1, 5, 6]


def test_only_rank_0_has_the_broadcaster() -> None:
    with pytest.raises(ValueError, match="rank 0 has no broadcaster; expected one on rank 0"):
        ModelUpdateGroup(trainer_ranks(10), None, Deadlines())
    other = trainer_ranks(10)
    other.rank = 1
    with (
        WeightBroadcaster(0, "127.0.0.1") as broadcaster,
        pytest.raises(ValueError, match="rank 1 has a broadcaster; expected one on rank 0"),
    ):
        ModelUpdateGroup(other, broadcaster, Deadlines())
