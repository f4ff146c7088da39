"""Gathering in a thread: one weight ahead and no further, and never longer than said."""

import threading
import time
import weakref
from collections.abc import Iterator

import pytest
import torch
from trainsync.engines.errors import GatherFailedError
from trainsync.engines.publish.gathering import GatherAhead, GatherAlong

LONG = 60.0


class Source:
    """Tells how many weights were asked for."""

    def __init__(self, count: int = 5, error: Exception | None = None) -> None:
        self.asked = 0
        self.gradients: list[bool] = []
        self.threads: set[int] = set()
        self.changed = threading.Condition()
        self._count, self._error = count, error

    def __call__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(self._count):
            with self.changed:
                self.asked += 1
                self.gradients.append(torch.is_grad_enabled())
                self.threads.add(threading.get_ident())
                self.changed.notify_all()
            yield str(number), torch.tensor(number)
        if self._error is not None:
            raise self._error

    def wait_asked(self, count: int) -> bool:
        with self.changed:
            return self.changed.wait_for(lambda: self.asked >= count, LONG)


def test_every_weight_comes_in_order_out_of_one_other_thread_without_gradients() -> None:
    source = Source()
    assert [(name, int(value)) for name, value in GatherAhead(source, LONG)] == [
        (str(number), number) for number in range(5)
    ]
    assert source.gradients == [False] * 5
    assert len(source.threads) == 1
    assert source.threads != {threading.get_ident()}


def test_one_weight_is_gathered_ahead_and_no_second_one() -> None:
    source = Source()
    ahead = GatherAhead(source, LONG)
    for given in range(4):
        next(ahead)
        assert source.wait_asked(given + 2), "the next one is not gathered meanwhile"
        assert source.asked == given + 2


def test_what_goes_wrong_in_the_thread_is_raised_and_then_it_is_over() -> None:
    ahead = GatherAhead(Source(1, ValueError("no such shard")), LONG)
    next(ahead)
    with pytest.raises(GatherFailedError, match="ValueError: no such shard") as raised:
        next(ahead)
    assert isinstance(raised.value.__cause__, ValueError)
    assert list(ahead) == []
    ahead.drain(LONG)


def test_a_gather_that_never_ends_is_given_up_in_time() -> None:
    released = threading.Event()

    def stuck() -> Iterator[tuple[str, torch.Tensor]]:
        released.wait(LONG)
        yield "late", torch.zeros(1)

    ahead = GatherAhead(stuck, 0.05)
    with pytest.raises(GatherFailedError, match=r"not gathered within 0\.05 s"):
        next(ahead)
    assert list(ahead) == [], "it is asked again"
    released.set()


def test_the_first_weight_may_take_longer_than_the_others() -> None:
    source = Source(2)

    def slow() -> Iterator[tuple[str, torch.Tensor]]:
        time.sleep(2.5)  # a model that is loaded back; longer than the others may take
        yield from source()

    ahead = GatherAhead(slow, 2.0)
    ahead.begin(LONG)
    ahead.begin(LONG)  # it is there already
    assert [name for name, _ in ahead] == ["0", "1"]

    ahead = GatherAhead(slow, LONG)
    with pytest.raises(GatherFailedError, match=r"not gathered within 0\.05 s"):
        ahead.begin(0.05)
    assert list(ahead) == []


def test_a_model_without_weights_begins_and_ends() -> None:
    ahead = GatherAhead(Source(0), LONG)
    ahead.begin(LONG)
    assert list(ahead) == []


def test_a_gather_that_was_given_up_goes_on_to_its_end_and_keeps_nothing() -> None:
    released = threading.Event()
    ended = threading.Event()
    given: list[weakref.ref[torch.Tensor]] = []

    def late() -> Iterator[tuple[str, torch.Tensor]]:
        released.wait(LONG)
        for number in range(5):
            tensor = torch.tensor(number)
            given.append(weakref.ref(tensor))
            yield str(number), tensor
            del tensor
        assert [weight() for weight in given[:-1]] == [None] * 4, "one is kept"
        ended.set()

    ahead = GatherAhead(late, 0.05)
    with pytest.raises(GatherFailedError):
        next(ahead)
    released.set()
    assert ended.wait(LONG), "it waits for room that nobody makes"
    assert list(ahead) == []


def test_what_was_gathered_ahead_goes_when_reading_what_is_left_takes_too_long() -> None:
    source = Source(50)
    ahead = GatherAhead(source, LONG)
    with pytest.raises(GatherFailedError, match="were not gathered within"):
        ahead.drain(-1.0)
    assert source.wait_asked(50), "it waits for room that nobody makes"


def test_what_was_left_is_read_to_its_end() -> None:
    source = Source()
    ahead = GatherAhead(source, LONG)
    next(ahead)
    ahead.drain(LONG)
    assert source.asked == 5


def test_going_along_reads_everything_and_keeps_what_went_wrong() -> None:
    source = Source(3)
    along = GatherAlong(source)
    assert along.wait(LONG)
    assert source.asked == 3
    assert along.problem is None

    along = GatherAlong(Source(2, ValueError("no such shard")))
    assert along.wait(LONG)
    assert "ValueError: no such shard" in str(along.problem)
