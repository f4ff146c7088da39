"""The queue of writers: one scope at a time, first come first served, no holder forever."""

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from trainsync.monitor.ledger.permit_queue import PermitQueue

TTL = 30.0


def test_writers_of_one_scope_write_together_and_others_wait() -> None:
    queue = PermitQueue(TTL)
    assert queue.ask("a", "node-1", 0.0, label="A").granted
    assert queue.ask("b", "node-1", 0.0, label="B").granted
    refused = queue.ask("c", "node-2", 1.0)
    assert (refused.granted, refused.lost, refused.held_by, refused.ahead) == (
        False, False, ("A", "B"), 0,
    )  # fmt: skip
    queue.release("a", 2.0)
    assert not queue.ask("c", "node-2", 2.0).granted
    queue.release("b", 3.0)
    assert queue.holders == 1, "granted when the last one left, without asking again"
    assert queue.ask("c", "node-2", 3.0).granted


def test_an_earlier_request_is_granted_earlier_even_within_a_scope() -> None:
    queue = PermitQueue(TTL)
    queue.ask("a", "node-1", 0.0)
    queue.ask("b", "node-2", 1.0)
    late = queue.ask("c", "node-1", 2.0)
    assert (late.granted, late.ahead) == (False, 1)
    queue.release("a", 3.0)
    assert queue.ask("b", "node-2", 3.0).granted
    assert not queue.ask("c", "node-1", 3.0).granted


def test_a_dead_holder_and_a_dead_waiter_are_forgotten() -> None:
    ended: list[None] = []
    queue = PermitQueue(TTL, on_ended=lambda: ended.append(None))
    queue.ask("dead", "1", 0.0)
    queue.ask("waiter that dies", "2", 1.0)
    queue.ask("alive", "3", 20.0)
    queue.ask("dead", "1", 5.0, held=True)
    assert not queue.ask("alive", "3", 34.9).granted
    assert queue.ask("alive", "3", 35.0).granted
    assert len(ended) == 1


def test_a_holder_with_an_expired_permit_continues_if_no_other_took_it() -> None:
    queue = PermitQueue(TTL)
    queue.ask("slow", "1", 0.0)
    assert queue.ask("slow", "1", 100.0, held=True).granted
    queue.ask("other", "2", 120.0)
    late = queue.ask("slow", "1", 200.0, held=True)
    assert (late.granted, late.lost) == (True, False), "the waiter is dead by now"
    queue.ask("other", "2", 225.0)
    queue.ask("other", "2", 235.0)
    lost = queue.ask("slow", "1", 240.0, held=True)
    assert (lost.granted, lost.lost) == (False, True)


def test_a_restarted_monitor_lets_old_holders_in_and_new_ones_wait_one_ttl() -> None:
    queue = PermitQueue(TTL, quiet_until=TTL)
    assert not queue.ask("new", "2", 0.0).granted
    assert queue.ask("old", "1", 10.0, held=True).granted
    assert queue.ask("old too", "1", 11.0, held=True).granted
    assert queue.ask("stranger", "3", 12.0, held=True).lost
    queue.ask("new", "2", 25.0)
    assert not queue.ask("new", "2", 31.0).granted, "the old one still holds"
    queue.release("old", 32.0)
    queue.release("old too", 32.0)
    assert queue.ask("new", "2", 32.0).granted


def test_after_the_quiet_time_a_waiting_rank_is_granted_without_asking_again() -> None:
    waited: list[float] = []
    queue = PermitQueue(TTL, quiet_until=TTL, on_granted=waited.append)
    queue.ask("new", "2", 5.0)
    queue.advance(29.0)
    assert queue.holders == 0
    queue.advance(30.0)
    assert queue.holders == 1
    assert waited == [25.0]


def test_releasing_twice_or_what_was_never_asked_for_changes_nothing() -> None:
    queue = PermitQueue(TTL)
    queue.ask("a", "1", 0.0)
    queue.release("b", 0.0)
    queue.release("a", 0.0)
    before = queue.revision
    queue.release("a", 0.0)
    assert queue.revision == before


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.sampled_from("12")), max_size=30))
@settings(max_examples=50)
def test_every_waiting_rank_is_served_in_the_end(asked: list[tuple[str, str]]) -> None:
    queue, served, scopes = PermitQueue(TTL), set(), dict(asked)
    for holder, scope in scopes.items():
        queue.ask(holder, scope, 0.0)
    while queue.holders:
        for holder in set(scopes) - served:
            if queue.ask(holder, scopes[holder], 0.0).granted:
                served.add(holder)
        for holder in served:
            queue.release(holder, 0.0)
    assert served == set(scopes)
    assert queue.waiters == 0


class Writers(RuleBasedStateMachine):
    """Writers that ask, renew, release and die; the clock goes on, the monitor restarts."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.queue = PermitQueue(TTL)
        self.believes: dict[str, tuple[str, float]] = {}  # holder: scope, when heard last

    names = st.sampled_from(["1a", "1b", "2a", "2b", "3a"])

    @rule(name=names)
    def ask(self, name: str) -> None:
        held = name in self.alive()
        if self.queue.ask(name, name[0], self.now, held=held).granted:
            self.believes[name] = (name[0], self.now)
        else:
            self.believes.pop(name, None)

    @rule(name=names)
    def release(self, name: str) -> None:
        self.queue.release(name, self.now)
        self.believes.pop(name, None)

    @rule(seconds=st.sampled_from([1.0, 10.0, 29.0, 31.0]))
    def go(self, seconds: float) -> None:
        self.now += seconds
        self.queue.advance(self.now)

    @rule()
    def restart(self) -> None:
        self.queue = PermitQueue(TTL, quiet_until=self.now + TTL)

    def alive(self) -> dict[str, str]:
        return {n: s for n, (s, heard) in self.believes.items() if self.now < heard + TTL}

    @invariant()
    def no_two_scopes_write_at_once(self) -> None:
        assert len(set(self.alive().values())) <= 1


Writers.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestWriters = Writers.TestCase
