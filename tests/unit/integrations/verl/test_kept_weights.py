"""Weights from a one-time iterator can be read by all rollouts, and their memory is reused."""

from collections.abc import Iterator

import torch
from trainsync.integrations.verl.kept_weights import KeptWeights


def coming(version: int, shape: tuple[int, ...] = (3,)) -> Iterator[tuple[str, torch.Tensor]]:
    yield "a", torch.full(shape, float(version))
    yield "b", torch.full((2, 2), version)


def values(kept: KeptWeights) -> dict[str, float]:
    return {name: float(tensor.flatten()[0]) for name, tensor in kept()}


def test_what_comes_once_is_read_as_often_as_it_is_asked_for() -> None:
    kept = KeptWeights()
    kept.begin(coming(1))
    assert values(kept) == values(kept) == {"a": 1.0, "b": 1.0}


def test_a_reading_that_stops_early_loses_nothing_for_the_next_one() -> None:
    kept = KeptWeights()
    kept.begin(coming(1))
    assert next(iter(kept()))[0] == "a"
    assert [name for name, _ in kept()] == ["a", "b"]


def test_the_memory_of_a_version_holds_the_next_one() -> None:
    kept = KeptWeights()
    kept.begin(coming(1))
    before = [tensor.data_ptr() for _, tensor in kept()]
    kept.begin(coming(2))
    assert [tensor.data_ptr() for _, tensor in kept()] == before
    assert values(kept) == {"a": 2.0, "b": 2.0}


def test_other_shapes_get_other_memory_and_names_that_went_are_forgotten() -> None:
    kept = KeptWeights()
    kept.begin(coming(1))
    list(kept())
    kept.begin(iter([("a", torch.zeros(5))]))
    assert [(name, tuple(tensor.shape)) for name, tensor in kept()] == [("a", (5,))]
    kept.begin(coming(3))
    assert values(kept) == {"a": 3.0, "b": 3.0}


def test_only_floating_point_weights_are_converted() -> None:
    kept = KeptWeights(torch.bfloat16)
    kept.begin(coming(1))
    assert [tensor.dtype for _, tensor in kept()] == [torch.bfloat16, torch.int64]


def test_weights_that_change_after_they_were_read_are_kept_as_they_were() -> None:
    live = torch.zeros(3)
    kept = KeptWeights()
    kept.begin(iter([("a", live)]))
    list(kept())
    live += 1
    assert values(kept) == {"a": 0.0}
