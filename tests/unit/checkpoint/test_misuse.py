"""Arguments that cannot be are refused in a sentence, at the call."""

from typing import Any

import pytest
import torch
import trainsync


@pytest.mark.parametrize("world_size", [0, -1, 2.0, True])
def test_participants_of_no_ranks_are_refused(world_size: Any) -> None:
    with pytest.raises(ValueError, match=f"world_size is {world_size}, expected an integer"):
        trainsync.all_ranks("model", world_size=world_size)


def test_there_is_nothing_to_load_from_a_run_that_has_committed_nothing() -> None:
    nothing: Any = None
    for load in (
        lambda resume: trainsync.load_sharded(resume, model=torch.nn.Linear(1, 1)),
        lambda resume: trainsync.load_shard(resume, "actor/model.pt"),
        lambda resume: trainsync.load_rank_shard(resume, "model", rank=0, world_size=1),
    ):
        with pytest.raises(TypeError, match="resume is None: the run has committed nothing"):
            load(nothing)
        with pytest.raises(TypeError, match=r"resume is a str, expected what ctx.resume\(\) gave"):
            load("runs/a")
