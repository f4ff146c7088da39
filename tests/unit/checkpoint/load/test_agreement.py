"""Ranks that load together hear of one another's failures, in time, without a collective."""

import threading
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch.distributed as dist
from trainsync.checkpoint.errors import LoadFailedError
from trainsync.checkpoint.load.agreement import Agreement
from trainsync.checkpoint.load.verify import Need, assign


def outcomes(
    works: list[Callable[[], str] | None], timeout: float = 20.0
) -> list[list[str] | BaseException | None]:
    """What each rank gets, threads standing for ranks; None stands for one that never comes."""
    store = dist.HashStore()
    got: list[list[str] | BaseException | None] = [None] * len(works)

    def run(rank: int, work: Callable[[], str]) -> None:
        agreement = Agreement(store, rank, len(works), timeout)
        try:
            got[rank] = agreement.do("reading", work)
        except BaseException as error:  # noqa: BLE001 - looked at below
            got[rank] = error

    threads = [
        threading.Thread(target=run, args=(rank, work))
        for rank, work in enumerate(works)
        if work is not None
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return got


def fail() -> str:
    raise ValueError("a flipped bit in b.pt")


def test_all_hear_what_all_say() -> None:
    assert outcomes([lambda: "a", lambda: "b", lambda: "c"]) == [["a", "b", "c"]] * 3


@pytest.mark.parametrize("failing", [0, 2])
def test_one_failure_is_everybodys_by_name_and_cause(failing: int) -> None:
    works: list[Callable[[], str] | None] = [lambda: "fine"] * 3
    works[failing] = fail
    for rank, outcome in enumerate(outcomes(works)):
        if rank == failing:
            assert isinstance(outcome, ValueError)
        else:
            assert isinstance(outcome, LoadFailedError)
            assert f"reading failed on rank {failing}: ValueError: a flipped bit" in str(outcome)


@pytest.mark.parametrize("gone", [0, 1])
def test_a_rank_that_never_comes_is_named_in_time(gone: int) -> None:
    works: list[Callable[[], str] | None] = [lambda: "fine"] * 3
    works[gone] = None
    got = outcomes(works, timeout=0.2)
    for rank in {0, 1, 2} - {gone}:
        assert isinstance(got[rank], LoadFailedError)
        assert f"rank {gone}" in str(got[rank])
        assert "said nothing within" in str(got[rank])


def test_a_store_that_is_gone_is_an_error_not_a_wait() -> None:
    host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = dist.TCPStore("127.0.0.1", host.port, is_master=False, timeout=timedelta(seconds=5))
    agreement = Agreement(store, 1, 2, 60.0)
    del host
    with pytest.raises(LoadFailedError, match="reading: the"):
        agreement.do("reading", lambda: "")


def test_a_second_load_does_not_hear_of_the_first() -> None:
    store = dist.HashStore()
    first, second = Agreement(store, 0, 2, 0.1), Agreement(store, 1, 2, 0.1)
    for agreement in (first, second):
        with pytest.raises((ValueError, LoadFailedError)):
            agreement.do("reading", fail)
    with pytest.raises(LoadFailedError, match="rank 1: said nothing"):
        Agreement(store, 0, 2, 0.1).do("reading", lambda: "")


def test_one_rank_alone_asks_nobody() -> None:
    assert Agreement(None, 0, 1, 0.0).do("reading", lambda: "x") == ["x"]


# -- who checks which file ------------------------------------------------------------------


def test_a_file_is_checked_once_on_each_host_that_needs_it() -> None:
    needs = [
        Need("a", frozenset({"0", "1"})),
        Need("a", frozenset({"1", "2"})),
        Need("b", frozenset({"1"})),
    ]
    work = assign(needs, {"0": 5, "1": 5, "2": 5})
    assert sorted(work[0] + work[1]) == ["0", "1", "2"]
    assert work[2] == ["1"]


def test_nobody_checks_what_it_does_not_need_and_the_work_is_even() -> None:
    needs = [Need("a", frozenset(map(str, range(12)))) for _ in range(3)]
    work = assign(needs, {str(number): 10 for number in range(12)})
    assert [len(paths) for paths in work] == [4, 4, 4]
    own = [Need("a", frozenset({f"{rank}"})) for rank in range(4)]
    assert assign(own, {str(rank): rank for rank in range(4)}) == [["0"], ["1"], ["2"], ["3"]]
