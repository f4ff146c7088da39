"""A tracked loader: each batch of each epoch is trained once, in any order, over restarts."""

import pickle
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchdata.stateful_dataloader import StatefulDataLoader
from trainsync.data.errors import DataMismatchError, NotInFlightError
from trainsync.data.loader import Batch, TrackedLoader


def stateful() -> Iterable[Any]:
    generator = torch.Generator().manual_seed(5)
    return StatefulDataLoader(list(range(12)), batch_size=2, shuffle=True, generator=generator)


def plain() -> Iterable[Any]:
    return [torch.tensor([2 * number, 2 * number + 1]) for number in range(6)]


class Epochs:
    """Reads its items in another order in each epoch, as torch's DistributedSampler does."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 6

    def __iter__(self) -> Any:
        order = torch.randperm(12, generator=torch.Generator().manual_seed(self.epoch))
        return iter(order.split(2))


LOADERS = [stateful, plain, Epochs]


def values(batch: Batch[Any]) -> list[tuple[int, int]]:
    return [(batch.epoch, int(value)) for value in batch.data]


def restarted(make: Callable[[], Iterable[Any]], state: bytes) -> TrackedLoader[Any]:
    loader = TrackedLoader(make())
    loader.load_state_dict(pickle.loads(state))
    return loader


@pytest.mark.parametrize("make", LOADERS)
def test_every_epoch_gives_every_batch(make: Callable[[], Iterable[Any]]) -> None:
    loader = TrackedLoader(make())
    seen = []
    for _ in range(2):
        for batch in loader.batches():
            loader.trained(batch)
            seen += values(batch)
    assert Counter(seen) == Counter((e, v) for e in range(2) for v in range(12))


@pytest.mark.parametrize("make", LOADERS)
def test_what_was_in_flight_comes_again_and_what_was_trained_does_not(
    make: Callable[[], Iterable[Any]],
) -> None:
    loader = TrackedLoader(make())
    dealt = loader.batches()
    first, second, third = next(dealt), next(dealt), next(dealt)
    loader.trained(second)
    assert loader.in_flight == (0, 2)
    again = restarted(make, pickle.dumps(loader.state_dict()))
    rest = list(again.batches())
    assert [batch.number for batch in rest] == [0, 2, 3, 4, 5]
    assert values(rest[0]) == values(first)
    assert values(rest[1]) == values(third)


@pytest.mark.parametrize("make", LOADERS)
def test_a_loop_that_was_left_is_gone_on_with(make: Callable[[], Iterable[Any]]) -> None:
    loader = TrackedLoader(make())
    seen = []
    for batch in loader.batches():
        loader.trained(batch)
        seen += values(batch)
        if batch.number == 2:
            break
    for batch in loader.batches():
        loader.trained(batch)
        seen += values(batch)
    assert Counter(seen) == Counter((0, v) for v in range(12))


def test_the_next_epoch_waits_for_what_is_in_flight() -> None:
    loader = TrackedLoader(plain())
    dealt = list(loader.batches())
    loader.trained(dealt[0])
    with pytest.raises(NotInFlightError, match=r"\[1, 2, 3, 4, 5\] of epoch 0"):
        loader.batches()
    with pytest.raises(NotInFlightError, match="batch 0 of epoch 0"):
        loader.trained(dealt[0])


def test_an_iterator_is_refused_since_a_restart_could_not_read_it_anew() -> None:
    with pytest.raises(TypeError, match="only once"):
        TrackedLoader(iter([1, 2]))


def test_an_empty_loader_raises_instead_of_ending_the_training_in_silence() -> None:
    with pytest.raises(DataMismatchError, match="gave no batch"):
        list(TrackedLoader([]).batches())


def test_a_dataset_of_another_length_or_a_foreign_state_is_refused() -> None:
    loader = TrackedLoader(plain())
    with pytest.raises(DataMismatchError, match="6 batches an epoch, this one 1"):
        TrackedLoader([0]).load_state_dict(loader.state_dict())
    with pytest.raises(DataMismatchError, match="no state of a TrackedLoader"):
        loader.load_state_dict({"epoch": 3})


def test_a_generator_function_that_gives_fewer_batches_than_were_trained_is_told() -> None:
    class Shrinking:
        def __init__(self, count: int) -> None:
            self.count = count

        def __iter__(self) -> Any:
            return iter(range(self.count))

    loader = TrackedLoader(Shrinking(4))
    for batch in loader.batches():
        loader.trained(batch)
        if batch.number == 2:
            break
    shrunk = TrackedLoader(Shrinking(2))
    shrunk.load_state_dict(loader.state_dict())
    with pytest.raises(DataMismatchError, match="gave 2 batches, and 3 were trained"):
        list(shrunk.batches())


@pytest.mark.parametrize("make", LOADERS)
@settings(max_examples=60)
@given(
    moves=st.lists(st.sampled_from(["take", "train", "save", "die"]), max_size=40),
    data=st.data(),
)
def test_the_surviving_history_has_each_batch_once_whenever_the_trainer_dies(
    make: Callable[[], Iterable[Any]], moves: list[str], data: st.DataObject
) -> None:
    epochs = 2
    loader = TrackedLoader(make())
    history: list[tuple[int, int]] = []
    flying: list[Batch[Any]] = []
    dealt = loader.batches()
    saved = (pickle.dumps(loader.state_dict()), 0)

    def take() -> bool:
        """Whether the training goes on: another batch is in flight, or another epoch begins."""
        nonlocal dealt
        batch = next(dealt, None)
        if batch is not None:
            flying.append(batch)
        elif not flying and loader.epoch + 1 < epochs:
            dealt = loader.batches()
        else:
            return False
        return True

    def train(index: int) -> None:
        batch = flying.pop(index)
        loader.trained(batch)
        history.extend(values(batch))

    for move in moves:
        if move == "take":
            take()
        elif move == "train" and flying:
            train(data.draw(st.integers(0, len(flying) - 1)))
        elif move == "save":
            saved = (pickle.dumps(loader.state_dict()), len(history))
        elif move == "die":
            loader = restarted(make, saved[0])
            flying, dealt = [], loader.batches()
            if loader.epoch >= epochs:
                dealt = iter(())
            del history[saved[1] :]
    while take() or flying:
        while flying:
            train(0)
    assert Counter(history) == Counter((e, v) for e in range(epochs) for v in range(12))
