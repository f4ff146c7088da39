"""Ranks of a run in a store: the one that hosts the monitor, and one that has the store alone."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from trainsync.api.protocol import (
    FailureReport,
    ParticipantRef,
    SaveKind,
    SaveState,
)
from trainsync.monitor.client.store import StoreMonitorClient, StoreRankClient, next_attempt
from trainsync.monitor.errors import ClaimRefusedError, FencedError, InvalidRequestError
from trainsync.monitor.ledger.saves import SaveOwner
from trainsync.storage.objects.bucket import ObjectBucket
from trainsync.storage.objects.live.records import StoredRecords

from tests.unit.monitor.store.runs import ONE, TWO, Run, request
from tests.waiting import eventually

CHECKPOINT = SaveKind.CHECKPOINT
INCARNATION = "aaaaaaaa0"


@dataclass
class Ranks:
    """``run`` writes parts of both."""

    run: Run
    host: StoreMonitorClient
    other: StoreRankClient

    @property
    def owner(self) -> SaveOwner:
        return SaveOwner(0, INCARNATION)


def rank_client(bucket: ObjectBucket) -> StoreRankClient:
    return StoreRankClient(bucket, attempt=0, incarnation=INCARNATION)


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    run = Run()
    host = StoreMonitorClient(run.bucket, attempt=0, incarnation=INCARNATION, tick_seconds=0.02)
    host.claim("local")
    yield Ranks(run, host, rank_client(run.bucket))
    host.close()


def save(ranks: Ranks, step: int, by: StoreMonitorClient | StoreRankClient) -> None:
    by.register(request(step, ONE, TWO))
    for part in (ONE, TWO):
        ranks.run.write(ranks.owner, step, part)


@pytest.mark.parametrize("by_host", [True, False])
def test_a_commit_is_heard_by_both_whoever_registered_it(ranks: Ranks, by_host: bool) -> None:
    save(ranks, 5, ranks.host if by_host else ranks.other)
    for client in (ranks.host, ranks.other):
        assert client.save_status(CHECKPOINT, 5, 20).state is SaveState.COMMITTED
    told = [client.save_status(CHECKPOINT, 5) for client in (ranks.host, ranks.other)]
    assert told[0].manifest_digest == told[1].manifest_digest
    news = ranks.host.newer_commit(CHECKPOINT, (-1, -1), 20)
    assert news is not None
    assert news.step == 5


def test_a_failure_of_a_rank_is_heard_by_the_host(ranks: Ranks) -> None:
    ranks.host.register(request(5, ONE, TWO))
    part = ParticipantRef(component="model", rank=1)
    ranks.other.failure(FailureReport(kind=CHECKPOINT, step=5, participant=part, error="no memory"))
    for client in (ranks.host, ranks.other):
        status = client.save_status(CHECKPOINT, 5, 20)
        assert (status.state, status.error) == (SaveState.ABORTED, "model.1: no memory")


def test_all_ranks_resume_from_the_same(ranks: Ranks) -> None:
    assert ranks.host.resume() is None
    assert ranks.other.resume() is None
    save(ranks, 5, ranks.host)
    assert ranks.host.save_status(CHECKPOINT, 5, 20).state is SaveState.COMMITTED
    eventually(lambda: ranks.other.resume() == ranks.host.resume() is not None)


def test_a_rank_is_told_of_its_attempts_own_commit_before_the_host_asks(ranks: Ranks) -> None:
    save(ranks, 5, ranks.host)
    assert ranks.host.save_status(CHECKPOINT, 5, 20).state is SaveState.COMMITTED
    eventually(lambda: ranks.other.resume() == ranks.host.resume() is not None)


def test_a_rank_of_an_attempt_that_is_over_is_fenced(ranks: Ranks) -> None:
    ranks.other.claim("local")
    assert next_attempt(ranks.run.bucket, "local") == 1
    with StoreHost(ranks.run.bucket, 1):
        with pytest.raises(FencedError, match="the run is at attempt 1"):
            ranks.other.resume()
        with pytest.raises(FencedError):
            ranks.other.claim("local")


def test_a_rank_that_the_host_did_not_claim_for_is_refused(ranks: Ranks) -> None:
    with pytest.raises(ClaimRefusedError, match="is not claimed by incarnation"):
        ranks.other.claim("elsewhere")
    stranger = StoreRankClient(ranks.run.bucket, attempt=0, incarnation="bbbbbbbb0")
    with pytest.raises(FencedError):
        stranger.claim("local")


def test_other_participants_and_another_state_dict_are_refused(ranks: Ranks) -> None:
    ranks.host.register(request(5, ONE, TWO))
    with pytest.raises(InvalidRequestError, match="other participants"):
        ranks.other.register(request(5, ONE))
    with pytest.raises(InvalidRequestError, match="another state dict"):
        ranks.other.register(request(5, ONE, TWO).model_copy(update={"reuse_state_dict": True}))
    there = StoredRecords(ranks.run.bucket, 0, INCARNATION, CHECKPOINT, 5).registration()
    assert there is not None
    assert len(there.participants) == 2


class StoreHost:
    """The host of another attempt, for as long as the body runs."""

    def __init__(self, bucket: ObjectBucket, attempt: int) -> None:
        self._client = StoreMonitorClient(
            bucket, attempt=attempt, incarnation=f"aaaaaaaa{attempt}", tick_seconds=0.02
        )

    def __enter__(self) -> StoreMonitorClient:
        self._client.claim("local")
        return self._client

    def __exit__(self, *_: object) -> None:
        self._client.close()
