"""Rank 0 tells the other ranks, waits for none, and is not waited for once it is gone."""

import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from trainsync.dist.errors import PeerError, PeerLostError
from trainsync.dist.rank_zero import RankZero
from trainsync.dist.store import connect


class Gone:
    """A heartbeat that has seen rank 0 end."""

    def lost(self) -> dict[int, str]:
        return {0: "it has ended"}


def test_rank_0_tells_without_waiting_and_keeps_few_words() -> None:
    store = dist.HashStore()
    first, second = (RankZero(store, rank, 2, kept=2) for rank in (0, 1))
    for step in range(5):
        first.tell(f"stop/{step}", str(step))
    assert [second.told(f"stop/{step}", 5) for step in (3, 4)] == ["3", "4"]
    assert store.num_keys() == 2


def test_each_call_takes_rank_0s_answer_of_the_same_number() -> None:
    store, answers = dist.HashStore(), iter(["a", "b"])
    first, second = (RankZero(store, rank, 2) for rank in (0, 1))
    assert [first.ask_once("resume", lambda: next(answers), 5) for _ in range(2)] == ["a", "b"]
    for answer in ("a", "b"):
        assert second.ask_once("resume", lambda: pytest.fail("rank 0 asks"), 5) == answer


def test_rank_0s_error_is_read_by_the_others_before_it_is_raised() -> None:
    store, read = dist.HashStore(), []

    def other() -> None:
        with pytest.raises(PeerError, match="rank 0 could not ask: ValueError: no manifest") as got:
            RankZero(store, 1, 2).ask_once("resume", str, 20)
        read.append(got.value)

    def fail() -> str:
        raise ValueError("no manifest")

    thread = threading.Thread(target=other)
    thread.start()
    with pytest.raises(ValueError, match="no manifest"):
        RankZero(store, 0, 2).ask_once("resume", fail, 20)
    assert store.check(["trainsync/resume/1/read/1"])
    thread.join(20)
    assert read


def test_a_rank_0_that_is_silent_or_gone_is_named() -> None:
    store = dist.HashStore()
    with pytest.raises(PeerError, match=r"stop/1: rank 0 said nothing within 0.1 s"):
        RankZero(store, 1, 2).told("stop/1", 0.1)
    began = time.monotonic()
    with pytest.raises(PeerLostError, match="resume: rank 0 is gone: it has ended"):
        RankZero(store, 1, 2, lost=Gone()).ask_once("resume", str, 300)
    assert time.monotonic() - began < 30
    # What rank 0 said before it ended counts.
    RankZero(store, 0, 2).tell("stop/2", "1")
    assert RankZero(store, 1, 2, lost=Gone()).told("stop/2", 300) == "1"


def test_a_store_that_is_gone_is_an_error_and_not_a_wait() -> None:
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = dist.TCPStore("127.0.0.1", host.port, is_master=False, timeout=timedelta(seconds=5))
    ranks = RankZero(connect(store), 1, 2)
    del host
    with pytest.raises(PeerLostError, match="stop/1: the store of the process group is gone"):
        ranks.told("stop/1", 60)
    with pytest.raises(PeerLostError, match="resume: the store of the process group is gone"):
        ranks.ask_once("resume", str, 60)
