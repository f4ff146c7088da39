"""Listings that lack what was just put, and puts that fail: nothing committed is lost by them."""

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from obstore.store import MemoryStore
from trainsync import failpoints
from trainsync.api.protocol import ParticipantRef, SaveKind, SaveRequest, SaveState
from trainsync.monitor.core.core import CoreSettings
from trainsync.monitor.ledger.saves import SaveOwner
from trainsync.monitor.store.core import StoreCore
from trainsync.storage.digest import format_digest, new_hasher
from trainsync.storage.objects import commits, inspecting, keys
from trainsync.storage.objects.bucket import Limits, ObjectBucket, ObjectInfo
from trainsync.storage.objects.errors import StoreUnavailableError
from trainsync.storage.objects.live import names
from trainsync.storage.objects.live.records import StoredRecords
from trainsync.storage.saves.receipts import FileEntry, Receipt

CHECKPOINT = SaveKind.CHECKPOINT
PATH = "actor/model.pt"


class LateBucket(ObjectBucket):
    """Its listings lack the keys that begin with one of ``hidden``; ``refused`` cannot be put."""

    def __init__(self) -> None:
        super().__init__(MemoryStore(), "memory://", Limits())
        self.hidden: tuple[str, ...] = ()
        self.refused = ""

    def objects(self, folder: str) -> list[ObjectInfo]:
        return [one for one in super().objects(folder) if not one.key.startswith(self.hidden)]

    def create(self, key: str, data: bytes) -> None:
        if key == self.refused:
            raise StoreUnavailableError(f"putting {key}: the store is away")
        super().create(key, data)

    def below(self, folder: str) -> list[ObjectInfo]:
        return [one for one in super().below(folder) if not one.key.startswith(self.hidden)]


@pytest.fixture
def bucket() -> Iterator[LateBucket]:
    made = LateBucket()
    yield made
    made.hidden = ()
    for step in commits.committed_steps(made, CHECKPOINT):
        stored = commits.read_manifest(made, CHECKPOINT, step)
        assert inspecting.size_findings(made, stored) == [], "what is committed is whole"


def monitor(
    bucket: ObjectBucket, attempt: int, keep: int | None = None
) -> tuple[StoreCore, SaveOwner]:
    core = StoreCore(
        bucket,
        CoreSettings(max_to_keep=keep),
        clock=lambda: datetime(2026, 1, 1, tzinfo=UTC),
    )
    owner = SaveOwner(attempt, f"aaaaaaaa{attempt}")
    core.claim(owner, "local", None)
    return core, owner


def save(
    bucket: ObjectBucket,
    core: StoreCore,
    owner: SaveOwner,
    step: int,
    of: int = 0,
    paths: tuple[str, ...] = (PATH,),
) -> SaveState:
    """A save of files with the same bytes; with ``of`` they are the objects of that step."""
    part = ParticipantRef(component="model", rank=0)
    core.saves.register(owner, SaveRequest(kind=CHECKPOINT, step=step, participants=[part]))
    hasher = new_hasher()
    hasher.update(b"bytes")
    receipt = Receipt(
        kind=CHECKPOINT,
        step=of or step,
        attempt=owner.attempt,
        incarnation=owner.incarnation,
        component="model",
        rank=0,
        world_size=1,
        files=tuple(FileEntry(path, 5, format_digest(hasher)) for path in paths),
        seconds=0.0,
        writer="bbbbbbbb",
    )
    shards = names.shards(receipt)
    if of:
        receipt = replace(receipt, step=step, kept=shards)
    for key in shards.values():
        bucket.create(key, b"bytes")
    records = StoredRecords(bucket, owner.attempt, owner.incarnation, CHECKPOINT, step)
    records.write_receipt(receipt)
    core.tick()
    return core.saves.save_status(owner, CHECKPOINT, step).state


def test_a_save_commits_though_the_listing_lacks_its_objects(bucket: LateBucket) -> None:
    core, owner = monitor(bucket, 0)
    bucket.hidden = (f"{keys.OBJECTS}/",)
    assert save(bucket, core, owner, 1) is SaveState.COMMITTED


def test_an_attempt_resumes_where_the_pointer_points_though_the_listing_lacks_the_step(
    bucket: LateBucket,
) -> None:
    core, owner = monitor(bucket, 0)
    for step in (1, 2):
        save(bucket, core, owner, step)
    bucket.hidden = (keys.manifest(CHECKPOINT, 2), f"{keys.OBJECTS}/")
    core, owner = monitor(bucket, 1)
    point = core.resume(owner)
    assert point is not None
    assert point.step == 2
    assert commits.read_pointer(bucket, CHECKPOINT) == 2


def test_a_sweep_spares_what_a_commit_names_that_the_listing_lacks(bucket: LateBucket) -> None:
    core, owner = monitor(bucket, 0)
    for step in (1, 2):
        save(bucket, core, owner, step)
    bucket.hidden = (f"{keys.MANIFESTS}/",)
    monitor(bucket, 1)
    bucket.hidden = ()
    assert commits.committed_steps(bucket, CHECKPOINT) == [1, 2]


def test_retention_spares_what_a_commit_names_that_the_listing_lacks(bucket: LateBucket) -> None:
    core, owner = monitor(bucket, 0, keep=1)
    save(bucket, core, owner, 1)
    bucket.hidden = (keys.manifest(CHECKPOINT, 2),)
    assert save(bucket, core, owner, 2, of=1) is SaveState.COMMITTED
    core.tick()
    bucket.hidden = ()
    assert commits.committed_steps(bucket, CHECKPOINT) == [2]


def test_a_monitor_ends_no_save_that_is_committed_though_the_listing_lacks_how_it_ended(
    bucket: LateBucket,
) -> None:
    """The monitor before was killed before it had removed what the participants had said."""
    core, owner = monitor(bucket, 0, keep=1)
    records = StoredRecords(bucket, owner.attempt, owner.incarnation, CHECKPOINT, 1)
    deleted: list[tuple[str, bytes]] = []

    def remember(point: str) -> None:
        if point == "outcome":
            deleted.extend(
                (one.key, bucket.get(one.key).data) for one in bucket.below(records.folder)
            )

    with failpoints.enabled(failpoints.LIVE, remember):
        save(bucket, core, owner, 1, paths=(PATH, "actor/optim.pt"))
    assert save(bucket, core, owner, 2, of=1) is SaveState.COMMITTED
    core.tick()
    for key, data in deleted:
        bucket.create(key, data)
    bucket.hidden = (names.outcome(records.folder),)
    core, owner = monitor(bucket, 1)
    core.tick()
    point = core.resume(owner)
    assert point is not None
    assert point.step == 2


def test_no_step_is_removed_before_it_is_recorded_that_it_was_committed(
    bucket: LateBucket,
) -> None:
    """Else the next monitor, which finds receipts alone, would abort the save, with its objects."""
    core, owner = monitor(bucket, 0, keep=1)
    folder = names.save(owner.attempt, owner.incarnation, CHECKPOINT, 1)
    bucket.refused = names.outcome(folder)
    save(bucket, core, owner, 1, paths=(PATH, "actor/optim.pt"))
    assert save(bucket, core, owner, 2, of=1) is SaveState.COMMITTED
    core.tick()
    bucket.refused = ""
    core, owner = monitor(bucket, 1)
    core.tick()
    point = core.resume(owner)
    assert point is not None
    assert point.step == 2
