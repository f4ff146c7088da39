"""The queue's rules under a clock of our own, and its tasks under the real one."""

import asyncio

from hypothesis import given
from hypothesis import strategies as st
from trainsync_operator.controller.queue import (
    FIRST_RETRY_SECONDS,
    LAST_RETRY_SECONDS,
    Backlog,
    WorkQueue,
    half_to_full,
)


def backlog() -> Backlog[str]:
    return Backlog(jitter=lambda wait: wait)


def test_a_key_asked_for_twice_is_taken_once() -> None:
    queue = backlog()
    queue.add("a")
    queue.add("a")
    assert queue.take(0) == "a"
    queue.done("a")
    assert queue.take(0) is None


def test_keys_come_in_the_order_in_which_they_were_asked_for() -> None:
    queue = backlog()
    for key in "abc":
        queue.add(key)
    assert [queue.take(0) for _ in "abc"] == ["a", "b", "c"]


def test_a_key_that_is_worked_on_is_not_given_to_a_second_worker_but_comes_back() -> None:
    queue = backlog()
    queue.add("a")
    assert queue.take(0) == "a"
    queue.add("a")
    assert queue.take(0) is None
    queue.done("a")
    assert queue.take(0) == "a"


def test_of_several_times_the_earliest_counts() -> None:
    queue = backlog()
    queue.add_at("a", 10)
    queue.add_at("a", 5)
    queue.add_at("a", 7)
    assert queue.next_due() == 5
    assert queue.take(4.9) is None
    assert queue.take(5) == "a"
    queue.done("a")
    assert queue.next_due() is None


def test_failures_in_a_row_wait_twice_as_long_up_to_a_bound() -> None:
    queue = backlog()
    waits, now = [], 0.0
    queue.add("a")
    for _ in range(12):
        assert queue.take(now) == "a"
        waits.append(queue.failed("a", now))
        now += waits[-1]
    assert waits[:4] == [FIRST_RETRY_SECONDS * 2**n for n in range(4)]
    assert waits[-1] == LAST_RETRY_SECONDS


def test_a_backoff_may_have_a_shorter_end_but_not_than_the_api_server_asks() -> None:
    queue = backlog()
    queue.add("a")
    now, waits = 0.0, []
    for _ in range(8):
        assert queue.take(now) == "a"
        waits.append(queue.failed("a", now, 0.0, 15.0))
        now += waits[-1]
    assert waits[-2:] == [15, 15]
    assert queue.take(now) == "a"
    assert queue.failed("a", now, 60.0, 15.0) == 60


def test_a_success_ends_the_backoff() -> None:
    queue = backlog()
    queue.add("a")
    queue.take(0)
    queue.failed("a", 0)
    assert queue.take(1) == "a"
    queue.done("a")
    queue.add("a")
    queue.take(1)
    assert queue.failed("a", 1) == FIRST_RETRY_SECONDS


def test_a_failing_key_does_not_hold_up_others() -> None:
    queue = backlog()
    queue.add("bad")
    queue.add("good")
    queue.take(0)
    queue.failed("bad", 0)
    assert queue.take(0) == "good"


def test_what_is_seen_of_a_failing_key_does_not_end_its_backoff() -> None:
    queue = backlog()
    queue.add("a")
    queue.take(0)
    wait = queue.failed("a", 0)
    queue.add("a")  # the event of the status that told of the failure
    assert queue.take(wait / 2) is None
    assert queue.take(wait) == "a"
    queue.add("a")
    assert queue.failed("a", wait) == 2 * wait
    queue.add("a")
    assert queue.take(wait) is None
    queue.add_at("a", wait + 0.01)
    assert queue.take(wait + 0.01) is None, "neither does an earlier time"
    assert queue.take(3 * wait) == "a"
    queue.done("a")


def test_a_time_asked_for_before_a_failure_does_not_shorten_the_backoff() -> None:
    queue = backlog()
    queue.add("a")
    queue.take(0)
    queue.add_at("a", 0.01)
    queue.failed("a", 0)
    assert queue.take(0.01) is None
    assert queue.take(FIRST_RETRY_SECONDS) == "a"


def test_an_edit_ends_the_backoff_of_a_failing_key_at_once() -> None:
    queue = backlog()
    queue.add("a")
    queue.take(0)
    queue.failed("a", 0)
    queue.add("a", edited=True)
    assert queue.take(0.01) == "a"
    queue.add("a", edited=True)  # while it is worked on
    queue.failed("a", 0.01)
    assert queue.take(0.02) == "a"
    assert queue.failed("a", 0.02) == FIRST_RETRY_SECONDS, "what failed before was another spec"


def test_what_the_api_server_asks_to_wait_holds_for_an_edit_too() -> None:
    queue = backlog()
    queue.add("a")
    queue.take(0)
    queue.add("a", edited=True)
    assert queue.failed("a", 0, 6.0) == 6.0, "it was edited while it was worked on"
    for edited in (True, False):
        queue.add("a", edited=edited)
        assert queue.take(5.9) is None
    queue.add_at("a", 1.0)
    assert queue.take(5.9) is None
    assert queue.take(6.0) == "a"
    queue.failed("a", 6.0, 6.0)
    queue.add("a", edited=True)  # while it waits
    assert queue.take(11.9) is None
    assert queue.take(12.0) == "a"
    queue.failed("a", 12.0)
    queue.add("a", edited=True)
    assert queue.take(12.0) == "a", "no wait is asked for any more"


@given(st.floats(min_value=0.001, max_value=1000))
def test_jitter_keeps_between_half_and_all(wait: float) -> None:
    assert wait / 2 <= half_to_full(wait) <= wait


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["add", "edit", "later", "take", "done", "failed", "throttled"]),
            st.sampled_from("abc"),
        )
    )
)
def test_no_key_is_lost_or_worked_on_twice_at_once(steps: list[tuple[str, str]]) -> None:
    queue, active, asked, now = backlog(), set[str](), set[str](), 0.0
    for step, key in steps:
        now += 0.3
        if step == "add":
            queue.add(key)
            asked.add(key)
        elif step == "edit":
            queue.add(key, edited=True)
            asked.add(key)
        elif step == "later":
            queue.add_at(key, now + 1)
            asked.add(key)
        elif step == "take":
            taken = queue.take(now)
            if taken is not None:
                assert taken not in active
                active.add(taken)
                asked.discard(taken)
        elif active:
            ended = sorted(active)[0]
            active.discard(ended)
            if step == "done":
                queue.done(ended)
            else:
                queue.failed(ended, now, 2.0 if step == "throttled" else 0.0)
                asked.add(ended)
    for key in active:
        queue.done(key)
    left = set()
    while (taken := queue.take(now + 1e9)) is not None:
        left.add(taken)
    assert left >= asked


async def test_a_waiting_worker_wakes_for_a_key_and_for_a_time() -> None:
    queue: WorkQueue[str] = WorkQueue()
    waiting = asyncio.create_task(queue.take())
    await asyncio.sleep(0)
    queue.add("a")
    async with asyncio.timeout(5):
        assert await waiting == "a"
        queue.done("a")
        queue.add_after("b", 0.01)
        assert await queue.take() == "b"


async def test_two_workers_share_two_keys() -> None:
    queue: WorkQueue[str] = WorkQueue()
    workers = [asyncio.create_task(queue.take()) for _ in range(2)]
    await asyncio.sleep(0)
    queue.add("a")
    queue.add("b")
    async with asyncio.timeout(5):
        assert set(await asyncio.gather(*workers)) == {"a", "b"}
