"""What training needs beside model and optimizer is saved as plain values, and goes on from it."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from trainsync.checkpoint.errors import (
    CorruptCheckpointError,
    StateMismatchError,
    UnsupportedStateError,
)
from trainsync.checkpoint.load.reshard.files import MappedShards
from trainsync.checkpoint.load.state import StateLoad
from trainsync.checkpoint.save.staging.pytree import map_tensors
from trainsync.checkpoint.training_state import LiveState, rng_state, set_rng_state, training_state

from tests.unit.checkpoint.sharded import save


class Counter:
    """A dataloader, as far as a checkpoint sees one."""

    def __init__(self, position: int = 0) -> None:
        self.position = position

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def scheduler(steps: int = 0) -> torch.optim.lr_scheduler.StepLR:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    made = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
    for _ in range(steps):
        optimizer.step()
        made.step()
    return made


def draws() -> tuple[float, float, float, float]:
    return (
        random.random(),
        random.gauss(0, 1),
        float(np.random.standard_normal()),
        float(torch.rand(())),
    )


def load(
    directory: Path,
    states: dict[int, object],
    rank: int,
    world_size: int,
    *,
    rng: bool = True,
    combine: Any = None,
    saved_by: int | None = None,
    **live: Any,
) -> StateLoad:
    component = save(directory, "extra_state", states, saved_by or len(states))
    made = StateLoad(
        MappedShards(directory.joinpath),
        component,
        LiveState(**live),
        rank,
        world_size,
        rng=rng,
        combine=combine,
    )
    made.read()
    return made


def test_random_numbers_go_on_where_they_were() -> None:
    random.gauss(0, 1)  # keeps a second one back
    np.random.standard_normal()  # so does this
    state = map_tensors(rng_state(), lambda tensor, _: tensor.clone())
    expected = draws()
    assert draws() != expected
    assert set_rng_state(state) == []
    assert draws() == expected


def test_verl_can_take_the_random_numbers() -> None:
    # Its load_rng_state, which hands numpy's state over as it is.
    state = rng_state()
    expected = draws()
    torch.set_rng_state(state["cpu"])
    np.random.set_state(state["numpy"])
    random.setstate(state["random"])
    assert draws() == expected


def test_random_numbers_of_an_accelerator_that_is_not_here_are_named() -> None:
    assert set_rng_state(rng_state() | {"cuda": torch.zeros(16, dtype=torch.uint8)}) == ["cuda"]


def test_everything_comes_back_on_the_same_ranks(tmp_path: Path) -> None:
    generators = {"shuffle": torch.Generator().manual_seed(3)}
    states = {
        rank: training_state(
            scheduler=scheduler(3),
            dataloader=Counter(10 + rank),
            generators=generators,
            extra={"seen": 100 + rank},
        )
        for rank in (0, 1)
    }
    expected = torch.rand(2, generator=generators["shuffle"])
    numbers = draws()
    live = {"shuffle": torch.Generator()}
    schedule, counter = scheduler(), Counter()
    made = load(tmp_path, states, 1, 2, scheduler=schedule, dataloader=counter, generators=live)
    assert (counter.position, schedule.last_epoch) == (0, 0)  # nothing has changed yet
    made.apply()
    assert (counter.position, schedule.last_epoch) == (11, 3)
    assert torch.equal(torch.rand(2, generator=live["shuffle"]), expected)
    assert draws() == numbers
    assert made.extra == {"seen": 101}
    assert made.restored == ["scheduler", "dataloader", "generators", "rng"]
    assert made.not_restored == {}


def test_another_number_of_ranks_goes_on_without_random_numbers_and_says_so(
    tmp_path: Path,
) -> None:
    shuffle = {"shuffle": torch.Generator().manual_seed(3)}
    states = {
        rank: training_state(scheduler=scheduler(3), generators=shuffle, extra={"rank": rank})
        for rank in (0, 1)
    }
    schedule, live = scheduler(), {"shuffle": torch.Generator().manual_seed(8)}
    made = load(tmp_path, states, 2, 3, scheduler=schedule, generators=live)
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    made.apply()
    assert torch.equal(torch.rand(1), expected)
    assert live["shuffle"].initial_seed() == 8
    assert (schedule.last_epoch, made.extra) == (3, {"rank": 0})
    assert made.restored == ["scheduler"]
    assert made.not_restored == {
        "generators": "it was saved by 2 ranks, each with its own",
        "rng": "it was saved by 2 ranks, each with its own",
    }


def test_a_dataloader_of_another_number_of_ranks_needs_a_function(tmp_path: Path) -> None:
    states = {rank: training_state(dataloader=Counter(10 + rank)) for rank in range(3)}
    with pytest.raises(StateMismatchError, match=r"saved by 3 ranks .* combine_dataloaders="):
        load(tmp_path, states, 0, 2, dataloader=Counter())
    counter = Counter()
    made = load(
        tmp_path,
        states,
        0,
        2,
        dataloader=counter,
        combine=lambda them: {"position": sum(state["position"] for state in them)},
    )
    assert len(made.paths) == 3
    made.apply()
    assert counter.position == 33


def test_state_of_rank_0_alone_is_loaded_by_every_rank_but_for_random_numbers(
    tmp_path: Path,
) -> None:
    states = {0: training_state(extra={"seen": 7})}
    made = load(tmp_path, states, 1, 2, saved_by=2)
    assert (made.extra, made.restored) == ({"seen": 7}, [])
    assert made.not_restored == {"rng": "it was saved by rank 0 of 2, each with its own"}
    assert load(tmp_path, states, 0, 2, saved_by=2).restored == ["rng"]


def test_what_was_saved_and_not_asked_for_is_said(tmp_path: Path) -> None:
    made = load(tmp_path, {0: training_state(scheduler=scheduler())}, 0, 1, rng=False)
    assert made.restored == []
    assert set(made.not_restored) == {"scheduler", "rng"}


@pytest.mark.parametrize(
    ("state", "live", "why"),
    [
        ({"rng": None}, {"scheduler": scheduler()}, "has no lr_scheduler; expected"),
        ({}, {"dataloader": Counter()}, "has no dataloader; expected"),
        (
            {"generators": {"a": torch.zeros(1)}},
            {"generators": {"b": torch.Generator()}},
            "has no generator b; it has a",
        ),
        ({"rng": {"cpu": torch.zeros(1)}}, {}, "rng of extra_state is not a state of random"),
    ],
)
def test_what_was_not_saved_cannot_be_asked_for(
    tmp_path: Path, state: object, live: dict[str, Any], why: str
) -> None:
    with pytest.raises(StateMismatchError, match=why):
        load(tmp_path, {0: state}, 0, 1, **live)


def test_a_state_that_is_no_mapping_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CorruptCheckpointError, match="holds a list; expected what training_state"):
        load(tmp_path, {0: [1]}, 0, 1)


def test_a_checkpoint_without_the_component_is_enough_when_nothing_of_it_is_needed(
    tmp_path: Path,
) -> None:
    made = StateLoad(
        MappedShards(tmp_path.joinpath), None, LiveState(), 0, 1, rng=True, combine=None
    )
    made.read()
    made.apply()
    assert set(made.not_restored) == {"rng"}
    with pytest.raises(StateMismatchError, match="no component extra_state, so no scheduler"):
        StateLoad(
            MappedShards(tmp_path.joinpath),
            None,
            LiveState(scheduler=scheduler()),
            0,
            1,
            rng=True,
            combine=None,
        )


@pytest.mark.parametrize("what", ["scheduler", "dataloader"])
def test_an_object_without_a_state_is_refused_with_what_to_do(what: str) -> None:
    with pytest.raises(UnsupportedStateError, match=f"the {what} is a list.*state_dict.*extra="):
        training_state(**{what: [1, 2]})  # type: ignore[arg-type]
    with pytest.raises(UnsupportedStateError, match="generator 'g' is a int"):
        training_state(generators={"g": 3})  # type: ignore[dict-item]
