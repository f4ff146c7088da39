"""`StoreVerifier`: a receipt has no problem only if the store holds what the receipt says."""

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import pytest
from obstore.store import MemoryStore
from trainsync.api.protocol import SaveKind
from trainsync.monitor.ledger.saves import SaveKey, SaveOwner
from trainsync.monitor.store.verifier import ObjectSizes, StoreVerifier, Verdict
from trainsync.storage.digest import format_digest, new_hasher
from trainsync.storage.objects.bucket import Limits, ObjectBucket, ObjectInfo
from trainsync.storage.objects.errors import StoreError, StoreUnavailableError
from trainsync.storage.objects.live import names
from trainsync.storage.saves.receipts import FileEntry, Receipt

from tests.unit.storage.objects.memory import memory

DATA = b"the bytes of a shard"
OWNER = SaveOwner(0, "aaaaaaaa")
NO_PROBLEM = Verdict(None)


class Later(Executor):
    """Runs what was submitted when it is told to."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._waiting.append((future, lambda: fn(*args, **kwargs)))
        return future

    def run(self) -> int:
        """How many there were."""
        ran, self._waiting = self._waiting, []
        for future, call in ran:
            try:
                future.set_result(call())
            except StoreError as error:
                future.set_exception(error)
        return len(ran)


def receipt_of(rank: int = 0, owner: SaveOwner = OWNER, step: int = 5) -> Receipt:
    hasher = new_hasher()
    hasher.update(DATA)
    return Receipt(
        kind=SaveKind.CHECKPOINT,
        step=step,
        attempt=owner.attempt,
        incarnation=owner.incarnation,
        component="model",
        rank=rank,
        world_size=2,
        files=(FileEntry(f"actor/model_{rank}.pt", len(DATA), format_digest(hasher)),),
        seconds=0.0,
        writer=f"bbbbbbbb{rank}",
    )


def key_of(receipt: Receipt) -> SaveKey:
    return SaveKey(SaveOwner(receipt.attempt, receipt.incarnation), receipt.step, receipt.kind)


def put(bucket: ObjectBucket, receipt: Receipt, data: bytes = DATA) -> str:
    (key,) = names.shards(receipt).values()
    bucket.create(key, data)
    return key


def verify(verifier: StoreVerifier, bucket: ObjectBucket, receipt: Receipt) -> Verdict | None:
    return verifier.verify(key_of(receipt), receipt, ObjectSizes(bucket))


@pytest.mark.parametrize("with_digest", [False, True])
def test_objects_that_are_as_the_receipt_says_have_no_problem(with_digest: bool) -> None:
    bucket, receipt = memory(), receipt_of()
    put(bucket, receipt)
    verifier = StoreVerifier(bucket, None, with_digest=with_digest)
    assert verify(verifier, bucket, receipt) == NO_PROBLEM
    assert not verifier.busy


def test_other_bytes_of_the_same_size_are_a_problem_only_where_objects_are_read() -> None:
    bucket, receipt = memory(), receipt_of()
    key = put(bucket, receipt, DATA[::-1])
    assert verify(StoreVerifier(bucket, None, with_digest=False), bucket, receipt) == NO_PROBLEM
    verdict = verify(StoreVerifier(bucket, None, with_digest=True), bucket, receipt)
    assert verdict is not None
    assert verdict.problem is not None
    assert verdict.problem.startswith(f"{key} has digest xxh3-128:")


@pytest.mark.parametrize(
    ("data", "said"), [(None, "is missing"), (DATA[1:], f"has {len(DATA) - 1} bytes")]
)
def test_an_object_of_another_size_is_named_and_not_read(data: bytes | None, said: str) -> None:
    bucket, receipt, later = memory(), receipt_of(), Later()
    if data is not None:
        put(bucket, receipt, data)
    (key,) = names.shards(receipt).values()
    verdict = verify(StoreVerifier(bucket, later, with_digest=True), bucket, receipt)
    assert verdict == Verdict(f"{key} {said}, expected {len(DATA)} bytes")
    assert later.run() == 0


def test_a_verdict_of_objects_that_are_read_elsewhere_is_given_once() -> None:
    bucket, receipt, later = memory(), receipt_of(), Later()
    put(bucket, receipt)
    verifier = StoreVerifier(bucket, later, with_digest=True)
    assert verify(verifier, bucket, receipt) is None
    assert verify(verifier, bucket, receipt) is None
    assert (verifier.busy, verifier.has_news) == (True, False)
    assert later.run() == 1, "they are read once, however often one asks"
    assert (verifier.busy, verifier.has_news) == (True, True)
    assert verify(verifier, bucket, receipt) == NO_PROBLEM
    assert (verifier.busy, verifier.has_news) == (False, False)


def test_an_object_that_goes_before_it_is_read_is_a_problem_and_no_error() -> None:
    bucket, receipt, later = memory(), receipt_of(), Later()
    key = put(bucket, receipt)
    verifier = StoreVerifier(bucket, later, with_digest=True)
    assert verify(verifier, bucket, receipt) is None
    bucket.delete([key])
    later.run()
    verdict = verify(verifier, bucket, receipt)
    assert verdict is not None
    assert key in str(verdict.problem)


def test_objects_of_a_store_that_was_away_are_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    bucket, receipt, later = memory(), receipt_of(), Later()
    put(bucket, receipt)
    verifier = StoreVerifier(bucket, later, with_digest=True)
    assert verify(verifier, bucket, receipt) is None

    def away(key: str, size: int) -> None:
        raise StoreUnavailableError("the store is away")

    with monkeypatch.context() as patch:
        patch.setattr(bucket, "blocks", away)
        later.run()
    with pytest.raises(StoreUnavailableError, match="the store is away"):
        verify(verifier, bucket, receipt)
    assert not verifier.busy, "the error was told, and no verdict was given"
    assert verify(verifier, bucket, receipt) is None
    later.run()
    assert verify(verifier, bucket, receipt) == NO_PROBLEM


OTHER = SaveOwner(1, "cccccccc")


@pytest.mark.parametrize(
    ("forget", "kept"),
    [
        (lambda verifier: verifier.forget(key_of(receipt_of())), [False, False, True, True]),
        (lambda verifier: verifier.keep([OTHER]), [False, False, False, True]),
        (lambda verifier: verifier.clear(), [False] * 4),
    ],
    ids=["save", "owners", "all"],
)
def test_what_is_read_of_saves_that_are_over_is_forgotten_and_no_other(
    forget: Callable[[StoreVerifier], None], kept: list[bool]
) -> None:
    bucket, later = memory(), Later()
    receipts = [receipt_of(), receipt_of(1), receipt_of(step=6), receipt_of(owner=OTHER)]
    verifier = StoreVerifier(bucket, later, with_digest=True)
    for receipt in receipts:
        put(bucket, receipt)
        assert verify(verifier, bucket, receipt) is None
    later.run()
    forget(verifier)
    assert verifier.busy is any(kept)
    assert [verify(verifier, bucket, receipt) == NO_PROBLEM for receipt in receipts] == kept


class Listing(ObjectBucket):
    """Counts listings, which lack the keys in ``late``."""

    def __init__(self) -> None:
        super().__init__(MemoryStore(), "memory://", Limits())
        self.listed = 0
        self.late: tuple[str, ...] = ()

    def below(self, folder: str) -> list[ObjectInfo]:
        self.listed += 1
        return [info for info in super().below(folder) if info.key not in self.late]


def test_sizes_of_a_step_take_one_listing() -> None:
    bucket = Listing()
    keys = [put(bucket, receipt_of(rank)) for rank in range(3)]
    sizes = ObjectSizes(bucket)
    assert [sizes.of(key) for key in keys] == [len(DATA)] * 3
    assert bucket.listed == 1


def test_an_object_that_a_late_listing_lacks_is_asked_for_itself() -> None:
    bucket = Listing()
    bucket.late = (put(bucket, receipt_of()),)
    sizes = ObjectSizes(bucket)
    assert sizes.of(bucket.late[0]) == len(DATA)
    assert sizes.of(bucket.late[0].replace("model_0", "model_7")) is None
