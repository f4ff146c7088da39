"""The exchange: every call is answered once, or its caller hears that it is still open."""

import asyncio
from collections.abc import Sequence

import pytest
from trainsync.api.protocol import SynchronizerAnswer, SynchronizerCall, SynchronizerReply
from trainsync.monitor.errors import FencedError, InvalidRequestError, TooManyWaitersError
from trainsync.monitor.exchange import calls
from trainsync.monitor.exchange.calls import FORGET_SECONDS, LONGEST_CALL, Exchange

from tests.unit.monitor.saves import FIRST, SECOND

LONG = 20.0


def call(number: int) -> SynchronizerCall:
    return SynchronizerCall(id=f"{number:08}", method="renew", arguments=["e", number])


def answers(*numbers: int) -> list[SynchronizerAnswer]:
    return [SynchronizerAnswer(id=f"{number:08}", value=number) for number in numbers]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def ids(found: Sequence[SynchronizerCall]) -> list[int]:
    return [int(each.id) for each in found]


async def test_an_answer_comes_to_the_caller_that_waits() -> None:
    exchange = Exchange()
    asked = [asyncio.create_task(exchange.ask(FIRST, call(n), LONG)) for n in (1, 2)]
    await asyncio.sleep(0)
    first = await exchange.calls(FIRST, "", 0, LONG)
    assert ids(first.calls) == [1, 2]
    later = asyncio.create_task(exchange.calls(FIRST, first.epoch, first.last, LONG))
    await asyncio.sleep(0)
    exchange.answer(FIRST, answers(2, 1, 99))
    assert [(await each).value for each in asked] == [1, 2]
    third = asyncio.create_task(exchange.ask(FIRST, call(3), LONG))
    assert ids((await later).calls) == [3]
    exchange.answer(FIRST, answers(3))
    assert await third == SynchronizerReply(done=True, value=3)


async def test_a_caller_that_comes_back_gets_the_answer_that_came_meanwhile() -> None:
    exchange = Exchange()
    assert await exchange.ask(FIRST, call(1), 0.0) == SynchronizerReply(done=False)
    exchange.answer(FIRST, answers(1))
    assert await exchange.ask(FIRST, call(1), 0.0) == SynchronizerReply(done=True, value=1)


async def test_another_process_or_one_that_lost_the_answer_gets_open_calls_again() -> None:
    exchange = Exchange()
    for number in (1, 2):
        await exchange.ask(FIRST, call(number), 0.0)
    found = await exchange.calls(FIRST, "", 0, 0.0)
    assert (await exchange.calls(FIRST, exchange.epoch, found.last, 0.0)).calls == []
    exchange.answer(FIRST, answers(1))
    assert ids((await exchange.calls(FIRST, "", 0, 0.0)).calls) == [2]
    # The monitor was another process before, with numbers of its own.
    assert ids((await exchange.calls(FIRST, "another", 7, 0.0)).calls) == [2]


async def test_a_new_attempt_forgets_the_calls_of_the_one_before() -> None:
    exchange = Exchange()
    exchange.admit(FIRST)
    waiting = asyncio.create_task(exchange.ask(FIRST, call(1), LONG))
    await asyncio.sleep(0)
    assert exchange.admits(FIRST)
    assert not exchange.admits(SECOND)
    exchange.admit(SECOND)
    assert not exchange.admits(FIRST)
    assert await waiting == SynchronizerReply(done=False)
    assert (await exchange.calls(SECOND, "", 0, 0.0)).calls == []


async def test_an_older_attempt_neither_asks_nor_answers_nor_comes_back() -> None:
    exchange = Exchange()
    exchange.admit(FIRST)
    fetching = asyncio.create_task(exchange.calls(FIRST, "", 0, LONG))
    await asyncio.sleep(0)
    exchange.admit(SECOND)
    await exchange.ask(SECOND, call(1), 0.0)
    for refused in (fetching, exchange.ask(FIRST, call(2), 0.0)):
        with pytest.raises(FencedError, match="attempt 1 is in force, not 0"):
            await refused
    with pytest.raises(FencedError):
        exchange.answer(FIRST, answers(1))
    with pytest.raises(FencedError):
        exchange.admit(FIRST)


async def test_a_call_that_is_too_long_is_refused() -> None:
    long = SynchronizerCall(id="01234567", method="refuse", arguments=["x" * LONGEST_CALL])
    with pytest.raises(InvalidRequestError, match="the arguments of refuse have more than"):
        await Exchange().ask(FIRST, long, 0.0)


async def test_calls_whose_caller_is_gone_are_forgotten_and_open_ones_are_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(calls, "MOST_CALLS", 2)
    clock = Clock()
    exchange = Exchange(clock)
    await exchange.ask(FIRST, call(1), 0.0)
    clock.now = FORGET_SECONDS / 2
    await exchange.ask(FIRST, call(2), 0.0)
    with pytest.raises(TooManyWaitersError):
        await exchange.ask(FIRST, call(3), 0.0)
    clock.now = FORGET_SECONDS + 1
    await exchange.ask(FIRST, call(3), 0.0)
    assert ids((await exchange.calls(FIRST, "", 0, 0.0)).calls) == [2, 3]


async def test_a_monitor_that_ends_lets_nobody_wait() -> None:
    exchange = Exchange()
    waiting = [
        asyncio.create_task(exchange.ask(FIRST, call(1), LONG)),
        asyncio.create_task(exchange.calls(FIRST, exchange.epoch, 1, LONG)),
    ]
    await asyncio.sleep(0)
    exchange.close()
    async with asyncio.timeout(5):
        await asyncio.gather(*waiting)
        assert not (await exchange.ask(FIRST, call(2), LONG)).done
