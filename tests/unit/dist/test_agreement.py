"""Ranks hear of one another's failures, in time, without a collective."""

import threading
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch.distributed as dist
from trainsync.dist.agreement import Agreement
from trainsync.dist.errors import PeerError, PeerLostError
from trainsync.dist.heartbeat import Heartbeat
from trainsync.dist.store import BoundedStore, connect


def outcomes(
    works: list[Callable[[], str] | None], timeout: float = 20.0
) -> list[list[str] | BaseException | None]:
    """What each rank gets, threads standing for ranks; None stands for one that never comes."""
    store = dist.HashStore()
    got: list[list[str] | BaseException | None] = [None] * len(works)

    def run(rank: int) -> None:
        work = works[rank]
        if work is None:
            return
        agreement = Agreement(store, rank, len(works), timeout)
        try:
            got[rank] = agreement.do("reading", work)
        except BaseException as error:  # noqa: BLE001 - looked at below
            got[rank] = error

    run_ranks(run, len(works))
    return got


def run_ranks(run: Callable[[int], None], world_size: int) -> None:
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()


def wait_until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "condition did not come true"
        time.sleep(0.01)


def fail() -> str:
    raise ValueError("a flipped bit in b.pt")


def test_all_hear_what_all_say() -> None:
    assert outcomes([lambda: "a", lambda: "b", lambda: "c"]) == [["a", "b", "c"]] * 3


@pytest.mark.parametrize("failing", [0, 2])
def test_one_failure_is_raised_on_every_rank_with_name_and_cause(failing: int) -> None:
    works: list[Callable[[], str] | None] = [lambda: "fine"] * 3
    works[failing] = fail
    for rank, outcome in enumerate(outcomes(works)):
        if rank == failing:
            assert isinstance(outcome, ValueError)
        else:
            assert isinstance(outcome, PeerError)
            assert f"reading failed on rank {failing}: ValueError: a flipped bit" in str(outcome)


@pytest.mark.parametrize("gone", [0, 1])
def test_a_rank_that_never_comes_is_named_in_time(gone: int) -> None:
    works: list[Callable[[], str] | None] = [lambda: "fine"] * 3
    works[gone] = None
    got = outcomes(works, timeout=0.2)
    for rank in {0, 1, 2} - {gone}:
        assert isinstance(got[rank], PeerError)
        assert f"rank {gone}" in str(got[rank])
        assert "said nothing within" in str(got[rank])


def test_a_store_that_is_gone_is_an_error_not_a_wait() -> None:
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = dist.TCPStore("127.0.0.1", host.port, is_master=False, timeout=timedelta(seconds=5))
    agreement = Agreement(store, 1, 2, 60.0)
    del host
    with pytest.raises(PeerError, match="reading: the"):
        agreement.do("reading", lambda: "")


def test_a_second_load_does_not_hear_of_the_first() -> None:
    store = dist.HashStore()
    first, second = Agreement(store, 0, 2, 0.1), Agreement(store, 1, 2, 0.1)
    for agreement in (first, second):
        with pytest.raises((ValueError, PeerError)):
            agreement.do("reading", fail)
    with pytest.raises(PeerError, match="rank 1: said nothing"):
        Agreement(store, 0, 2, 0.1).do("reading", lambda: "")


def test_a_rank_that_answers_and_ends_has_answered() -> None:
    store = dist.HashStore()

    class EndsAtOnce:
        """Learns that the other rank has ended in the moment in which that has answered."""

        def lost(self) -> dict[int, str]:
            store.set("trainsync/load/1/1", '{"round": 1, "value": "the last"}')
            store.add("trainsync/load/1/read/1", 1)
            return {1: "it has ended"}

    agreement = Agreement(store, 0, 2, 20.0, lost=EndsAtOnce())
    assert agreement.do("reading", lambda: "mine") == ["mine", "the last"]


def test_ranks_agree_over_connections_of_their_own_to_a_tcp_store() -> None:
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    got: list[list[str] | None] = [None, None]

    def run(rank: int) -> None:
        theirs = dist.TCPStore("127.0.0.1", host.port, is_master=False)
        agreement = Agreement(connect(dist.PrefixStore("default", theirs)), rank, 2, 20.0)
        for _ in range(20):
            got[rank] = agreement.do("reading", lambda: str(rank))

    run_ranks(run, 2)
    assert got == [["0", "1"]] * 2


def test_a_store_whose_host_was_stopped_is_not_waited_for() -> None:
    class Stopped(dist.HashStore):
        """Answers nothing, as a socket to a stopped process."""

        def check(self, keys: list[str]) -> bool:
            return not go_on.wait(60.0)

    go_on = threading.Event()
    agreement = Agreement(BoundedStore(Stopped(), 0.2), 1, 2, 600.0)
    for _ in range(2):
        with pytest.raises(PeerLostError, match=r"is gone .*did not answer within 0.2 s"):
            agreement.do("reading", lambda: "")
    go_on.set()


def test_a_single_rank_needs_no_store() -> None:
    assert Agreement(None, 0, 1, 0.0).do("reading", lambda: "x") == ["x"]


def test_a_rank_with_a_problem_hears_of_the_others_when_it_waits_for_them() -> None:
    store = dist.HashStore()
    raised: list[BaseException | None] = [None, None]

    def run(rank: int) -> None:
        agreement = Agreement(store, rank, 2, 20.0)
        try:
            agreement.agree("", ValueError(f"of rank {rank}"), "publishing", 20.0)
        except ValueError as error:
            raised[rank] = error

    run_ranks(run, 2)
    for rank, error in enumerate(raised):
        assert str(error) == f"of rank {rank}"
        [note] = getattr(error, "__notes__", [])
        assert note == f"publishing failed on rank {1 - rank}: ValueError: of rank {1 - rank}"


def test_a_word_of_rank_0_is_heard_once_it_is_said_and_rounds_follow_one_another() -> None:
    store, heard = dist.HashStore(), []

    def run(rank: int) -> None:
        agreement = Agreement(store, rank, 2, 20.0)
        for word in (3, 0, 5):
            if rank == 0:
                agreement.say(word)
            else:
                coming = agreement.listen()
                heard.append(coming.get(20.0, "hearing"))
                assert coming.over
            assert agreement.agree(str(rank), None, "going on", 20.0) == ["0", "1"]

    run_ranks(run, 2)
    assert heard == [3, 0, 5]


def test_no_rank_waits_for_a_rank_without_heartbeat() -> None:
    store = dist.HashStore()
    hearts = [Heartbeat(store, rank, 3, beat=0.02, lost_after=1.0) for rank in range(3)]
    raised: list[BaseException | None] = [None, None]

    def run(rank: int) -> None:
        agreement = Agreement(store, rank, 3, 600.0, lost=hearts[rank])
        try:
            agreement.do("reading", lambda: "fine")
        except PeerLostError as error:
            raised[rank] = error

    stopped = hearts[2]
    stopped._store = dist.HashStore()  # its writes reach no other rank, as if the rank were killed
    run_ranks(run, 2)
    for error in raised:
        assert "rank 2" in str(error)
        assert "no sign of life for 1 s" in str(error)
    stopped._store = store  # it was stopped, and goes on
    wait_until(lambda: 2 not in hearts[0].lost())
    hearts[1].close()
    wait_until(lambda: hearts[0].lost().get(1) == "it has ended")
    for heart in hearts:
        heart.close()


def test_ranks_of_a_subgroup_watch_one_another_past_those_that_are_in_none() -> None:
    store = dist.HashStore()
    hearts = {rank: Heartbeat(store, rank, 6, beat=0.02, lost_after=5.0) for rank in (0, 3)}
    wait_until(lambda: store.check(["trainsync/alive/0", "trainsync/alive/3"]))
    time.sleep(0.1)  # several beats without a missing rank
    assert hearts[0].lost() == {}
    hearts[3].close()
    wait_until(lambda: hearts[0].lost() == {3: "it has ended"})
    hearts[0].close()
