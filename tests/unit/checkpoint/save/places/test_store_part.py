"""Files of a part that goes straight into a store, and the digests beside them."""

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from obstore.store import MemoryStore
from trainsync.api.protocol import SaveKind
from trainsync.checkpoint.errors import SaveFailedError
from trainsync.checkpoint.save.files.dumping import dump
from trainsync.checkpoint.save.places import uploading
from trainsync.checkpoint.save.places.store import StorePart, StorePlace
from trainsync.storage.block_digests import BLOCK, beside, decode
from trainsync.storage.errors import UnsafePathError
from trainsync.storage.objects.bucket import Limits, ObjectBucket
from trainsync.storage.objects.errors import StoreRefusedError, StoreUnavailableError
from trainsync.storage.objects.live.term import Tenure
from trainsync.storage.retry_limits import RetryLimits
from trainsync.storage.saves.receipts import Participant, ParticipantFailure, Receipt, SaveOutcome

from tests.unit.storage.objects.memory import memory

MODEL = Participant("actor", 0)


@pytest.fixture
def part() -> StorePart:
    place = StorePlace(memory(), 0, "a" * 8)
    return place.part(SaveKind.CHECKPOINT, 5, Participant("actor", 0))


def test_a_file_of_several_blocks_has_their_digests_beside_it(part: StorePart) -> None:
    state = {"w": torch.rand(BLOCK)}
    file, digests = part.write_state("actor/model.pt", partial(dump, state), state["w"].nbytes)
    assert (file.path, digests.path) == ("actor/model.pt", beside("actor/model.pt"))
    small = os.urandom(BLOCK)
    assert [entry.path for entry in part.write_small({"actor/small": small})] == ["actor/small"]
    bucket = part._bucket
    stored = {info.key.partition("actor/")[2]: info.key for info in bucket.below("objects")}
    data = bucket.get(stored["model.pt"]).data
    blocks = decode(bucket.get(stored[beside("model.pt")]).data, file.bytes)
    assert blocks is not None
    assert len(data) == file.bytes
    for number, start in enumerate(range(0, len(data), BLOCK)):
        assert blocks.match(number, memoryview(data)[start : start + BLOCK])


def test_a_file_with_the_name_of_digests_is_refused(part: StorePart) -> None:
    def save_fn(directory: Path) -> None:
        (directory / "mine.xxh3-blocks").write_bytes(b"x")

    part.produce(save_fn)
    with pytest.raises(UnsafePathError, match=r"'actor/mine\.xxh3-blocks' is refused"):
        part.adopt(lambda path: f"actor/{path}")
    part.clear()


class Faulty:
    """obstore's store; ``fault`` is called before each request, and may raise."""

    def __init__(self) -> None:
        self._store = MemoryStore()
        self.fault: Callable[[str], object] = lambda key: None

    def __getattr__(self, name: str) -> Any:
        def call(*given: Any, **more: Any) -> Any:
            self.fault(str(given[0]) if given else "")
            return getattr(self._store, name)(*given, **more)

        return call


def refuse_first(count: int, error: Exception) -> Callable[[str], object]:
    left = iter([error] * count)

    def fault(key: str) -> None:
        if (found := next(left, None)) is not None:
            raise found

    return fault


def retrying(store: Faulty, **bounds: Any) -> StorePart:
    place = StorePlace(ObjectBucket(store, "s3://b"), 0, "a" * 8)  # type: ignore[arg-type]
    short = {"first_wait_seconds": 0.01, "longest_wait_seconds": 0.02}
    retry_limits = RetryLimits(**{"until": time.monotonic() + 60, **short, **bounds})
    return place.part(SaveKind.CHECKPOINT, 5, MODEL, retry_limits)


REFUSED = OSError("error trying to connect: ConnectionRefused")
DENIED = OSError("Client error with status 403 Forbidden: <Code>AccessDenied</Code>")


def receipt(part: StorePart, *files: Any) -> Receipt:
    return Receipt(
        kind=SaveKind.CHECKPOINT,
        step=5,
        attempt=0,
        incarnation="a" * 8,
        component="actor",
        rank=0,
        world_size=1,
        files=tuple(files),
        seconds=0.0,
        writer=part.writer,
    )


def test_every_step_of_a_part_waits_for_a_store_that_is_away() -> None:
    store, waited = Faulty(), list[float]()
    part = retrying(store, on_wait=waited.append)
    state = {"w": torch.rand(1000)}
    store.fault = refuse_first(10, REFUSED)
    assert part.records.outcome() is None
    store.fault = refuse_first(10, REFUSED)
    files = part.write_state("actor/model.pt", partial(dump, state), state["w"].nbytes)
    store.fault = refuse_first(10, REFUSED)
    files += part.write_small({"actor/note.json": b"{}"})
    store.fault = refuse_first(10, REFUSED)
    part.write_receipt(receipt(part, *files))
    assert part.records.receipt(MODEL) == receipt(part, *files)
    assert sum(waited) > 0


def test_an_object_of_several_parts_is_put_anew_with_all_of_its_bytes() -> None:
    store = Faulty()
    part = retrying(store)
    part._bucket.limits = Limits(part_bytes=5 << 20)
    state = {"w": torch.rand(4 << 20)}
    broken = iter([True, True])
    puts: list[str] = []

    def fault(key: str) -> None:
        if key.endswith("model.pt"):
            puts.append(key)
            if next(broken, False):
                raise REFUSED

    store.fault = fault
    (file, _) = part.write_state("actor/model.pt", partial(dump, state), state["w"].nbytes)
    objects = {info.key: info.bytes for info in part._bucket.below("objects")}
    whole = [key for key in objects if key.endswith("model.pt")]
    assert len(set(puts)) == 3, "each time under another key"
    assert [objects[key] for key in whole] == [file.bytes]
    assert part.writer in whole[0]


def test_what_waiting_cannot_mend_is_raised_at_once() -> None:
    store = Faulty()
    part = retrying(store, first_wait_seconds=100.0)
    store.fault = refuse_first(1, DENIED)
    with pytest.raises(StoreRefusedError, match="access is denied"):
        part.write_state("actor/model.pt", partial(dump, {"w": torch.ones(1)}), 4)


def test_the_wait_is_bounded() -> None:
    store = Faulty()
    part = retrying(store, until=time.monotonic() + 0.3)
    store.fault = refuse_first(10_000, REFUSED)
    with pytest.raises(StoreUnavailableError, match="the connection was refused"):
        part.write_state("actor/model.pt", partial(dump, {"w": torch.ones(1)}), 4)


def test_a_part_whose_save_ended_meanwhile_is_given_up() -> None:
    store = Faulty()
    part = retrying(store)
    outcome = SaveOutcome(kind=SaveKind.CHECKPOINT, step=5, error="rank 1 died")

    def end(key: str) -> None:
        if key.endswith(".pt"):
            store.fault = lambda key: None
            part.records.write_outcome(outcome)
            store.fault = refuse_first(1, REFUSED)
            raise REFUSED

    store.fault = end
    part._bucket.limits = Limits(part_bytes=5 << 20)
    with pytest.raises(FileNotFoundError, match="the save has ended"):
        part.write_state("actor/model.pt", partial(dump, {"w": torch.ones(4 << 20)}), 16 << 20)
    assert part._bucket.below("objects") == []


@pytest.mark.parametrize("error", ["rank 1 died", None])
def test_an_upload_ends_with_its_save_though_the_store_is_there(
    monkeypatch: pytest.MonkeyPatch, error: str | None
) -> None:
    """What is left of it would take its time of a bounded bandwidth from the next save."""
    monkeypatch.setattr(uploading, "ASK_SECONDS", 0.0)
    store = Faulty()
    part = retrying(store)
    part._bucket.limits = Limits(part_bytes=5 << 20)
    outcome = SaveOutcome(kind=SaveKind.CHECKPOINT, step=5, error=error)

    def end(key: str) -> None:
        if key.endswith(".pt"):
            store.fault = lambda key: None
            part.records.write_outcome(outcome)

    store.fault = end
    with pytest.raises(FileNotFoundError, match="the save has ended while"):
        part.write_state("actor/model.pt", partial(dump, {"w": torch.ones(25 << 20)}), 100 << 20)
    assert part._bucket.below("objects") == []


def test_a_store_that_does_not_say_how_a_save_ended_ends_no_upload(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(uploading, "ASK_SECONDS", 0.0)
    store, asked = Faulty(), list[str]()
    part = retrying(store)
    part._at_once.bucket.limits = Limits(part_bytes=5 << 20, retry_seconds=0.0)

    def refuse(key: str) -> None:
        if "OUTCOME" in key.upper():
            asked.append(key)
            raise DENIED

    store.fault = refuse
    part.write_state("actor/model.pt", partial(dump, {"w": torch.ones(4 << 20)}), 16 << 20)
    assert asked


@pytest.mark.parametrize(
    ("attempt", "incarnation", "goes_on"),
    [(0, "a" * 8, True), (0, "b" * 8, False), (1, "a" * 8, False)],
)
def test_a_part_of_an_incarnation_that_is_over_is_given_up(
    attempt: int, incarnation: str, goes_on: bool
) -> None:
    store = Faulty()
    part = retrying(store)
    tenure = Tenure(part._bucket, "uid", "c" * 8)
    tenure.take(lambda there: None)
    tenure.claim(attempt, "main", incarnation)
    part._bucket.limits = Limits(part_bytes=5 << 20)
    broken = iter([True])

    def fault(key: str) -> None:
        if key.endswith("model.pt") and next(broken, False):
            raise REFUSED

    store.fault = fault
    state = {"w": torch.ones(4 << 20)}
    if goes_on:
        assert part.write_state("actor/model.pt", partial(dump, state), 16 << 20)
        return
    with pytest.raises(SaveFailedError, match=f"not in force, the run is at attempt {attempt}"):
        part.write_state("actor/model.pt", partial(dump, state), 16 << 20)
    assert part._bucket.below("objects") == []


def test_a_failure_is_not_waited_for() -> None:
    store = Faulty()
    part = retrying(store, first_wait_seconds=1000.0, longest_wait_seconds=1000.0)
    store.fault = refuse_first(10_000, REFUSED)
    failure = ParticipantFailure(
        kind=SaveKind.CHECKPOINT,
        step=5,
        attempt=0,
        incarnation="a" * 8,
        component="actor",
        rank=0,
        error="the process exits",
    )
    with pytest.raises(StoreUnavailableError, match="the connection was refused"):
        part.write_failure(failure)
