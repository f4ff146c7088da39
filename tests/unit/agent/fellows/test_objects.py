"""Objects of a store between agents over real connections."""

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import xxhash
from obstore.store import MemoryStore
from trainsync.agent.fellows.holding import Holding
from trainsync.agent.fellows.objects import FellowsObjects
from trainsync.api.protocol import Fellow
from trainsync.storage.objects.bucket import ObjectBucket
from trainsync.storage.objects.errors import ObjectMissingError, StoreUnavailableError
from trainsync.storage.saves.receipts import FileEntry
from trainsync.weights.errors import DigestMismatchError
from trainsync.weights.transports.anchors.index import StoredObject

from tests.unit.agent.fellows.part import SECONDS, STALL, Part


def _digest(data: bytes) -> str:
    return f"xxh3-128:{xxhash.xxh3_128_hexdigest(data)}"


class Place:
    """A store with objects, and agents."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self.bucket = ObjectBucket(MemoryStore(), "memory")
        self.fellows: list[Fellow] = []
        self.objects = [self.put("1-00.anchor", 3_000_001), self.put("2-00.delta", 5)]

    def put(self, name: str, size: int) -> StoredObject:
        data = os.urandom(size)
        key = f"weights/run/1-abc/{name}"
        self.bucket.create(key, data)
        return StoredObject(key, size, _digest(data))

    def data(self, stored: StoredObject) -> bytes:
        return self.bucket.get(stored.key).data

    def agent(self, name: str, bucket: ObjectBucket | None = None) -> "Taking":
        return Taking(self, self._folder / name, name, self._stack, bucket or self.bucket)


class Taking(Part):
    """An agent's part that reads objects."""

    def __init__(
        self, place: Place, folder: Path, name: str, stack: ExitStack, bucket: ObjectBucket
    ) -> None:
        super().__init__(lambda: place.fellows, name, stack)
        self.folder = folder
        given = folder, self.known, self.server, self.metrics, STALL, self.room_beside
        self.objects = FellowsObjects(bucket, *given)
        self.objects.begin(1, 1)
        stack.callback(self.objects.close)

    def take(self, stored: StoredObject, seconds: float = SECONDS) -> bytes:
        return b"".join(self.objects(stored, time.monotonic() + seconds))


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with ExitStack() as stack:
        yield Place(tmp_path, stack)


def test_the_head_of_a_chain_alone_reads_the_store(place: Place) -> None:
    nothing = ObjectBucket(MemoryStore(), "nothing")
    chain = [place.agent("a"), place.agent("b", nothing), place.agent("c", nothing)]
    place.fellows = [agent.fellow for agent in chain]
    size = sum(stored.bytes for stored in place.objects)
    for agent in chain:
        for stored in place.objects:
            assert agent.take(stored) == place.data(stored)
    assert [agent.fetched("store") for agent in chain] == [size, 0, 0]
    assert [agent.fetched("fellow") for agent in chain] == [0, size, size]


def test_an_object_that_a_fellow_has_not_or_gives_with_other_bytes_comes_from_the_store(
    place: Place, tmp_path: Path
) -> None:
    head, last = place.agent("a"), place.agent("b")
    place.fellows = [head.fellow]
    anchor, delta = place.objects
    assert last.take(delta) == place.data(delta)
    last.objects.begin(2, 1)  # a fellow that failed is asked again for the next version
    forged = Holding(tmp_path / "held", [FileEntry(anchor.key, anchor.bytes, anchor.digest)])
    forged.path(0).write_bytes(bytes(anchor.bytes))
    forged.wrote(0, anchor.bytes)
    head.server.add(forged)
    assert last.take(anchor) == place.data(anchor)
    assert last.fetched("store") == delta.bytes + anchor.bytes
    assert last.fetched("fellow") == 0


def test_what_the_store_has_not_or_has_damaged_is_an_error_and_nothing_is_held(
    place: Place,
) -> None:
    agent = place.agent("a")
    anchor, delta = place.objects
    place.bucket.delete([anchor.key])
    with pytest.raises(ObjectMissingError):
        agent.take(anchor)
    place.bucket.replace(delta.key, b"12345", place.bucket.get(delta.key))
    with pytest.raises(DigestMismatchError, match=delta.digest):
        agent.take(delta)
    assert not list(agent.folder.iterdir())


def test_a_store_that_is_slow_is_given_up_at_the_deadline(place: Place) -> None:
    with pytest.raises(StoreUnavailableError, match="did not answer in time"):
        place.agent("a").take(place.objects[0], seconds=-1.0)


def test_the_next_version_takes_the_memory_of_the_one_before(place: Place) -> None:
    agent = place.agent("a")
    for stored in place.objects:
        agent.take(stored)
    assert len(list(agent.folder.iterdir())) == 2
    agent.objects.begin(2, 1)
    assert not list(agent.folder.iterdir())
    agent.take(place.objects[1])
    agent.server.close()
    assert not list(agent.folder.iterdir())


def test_an_object_that_is_read_again_for_another_way_to_a_version_is_held_once(
    place: Place,
) -> None:
    agent = place.agent("a")
    for _ in range(3):
        assert agent.take(place.objects[0]) == place.data(place.objects[0])
    assert len(list(agent.folder.iterdir())) == 1


def test_memory_is_given_back_once_where_a_read_of_another_way_was_under_way(place: Place) -> None:
    anchor = place.objects[0]
    others = [place.put(f"{number}-00.anchor", anchor.bytes) for number in (3, 4)]
    read_again: list[bytes] = []

    class Overtaken(ObjectBucket):
        def until(self, deadline: float) -> ObjectBucket:
            if not read_again:
                read_again.append(b"")  # the second read ends while the first one goes on
                read_again[:] = [agent.take(anchor)]
            return place.bucket.until(deadline)

    agent = place.agent("a", Overtaken(MemoryStore(), "memory"))
    agent.room = 2 * anchor.bytes
    agent.objects.begin(2, 1)
    assert agent.take(anchor) == place.data(anchor) == read_again[0]
    assert agent.unheld == 0
    for other in others:
        assert agent.take(other) == place.data(other)
    assert len(list(agent.folder.iterdir())) == 2
    assert agent.unheld == 1


def test_without_room_in_memory_the_store_is_read_as_without_fellows(place: Place) -> None:
    agent = place.agent("a")
    agent.objects.close()  # the folder is gone: nothing can be written there
    assert agent.take(place.objects[0]) == place.data(place.objects[0])
    assert agent.fetched("store") == place.objects[0].bytes
    assert agent.unheld == 1


def test_objects_are_held_as_far_as_staging_leaves_memory(place: Place) -> None:
    agent = place.agent("a")
    anchor, delta = place.objects
    agent.room = anchor.bytes + delta.bytes - 1
    for version in (2, 3):
        agent.objects.begin(version, 1)
        for stored in place.objects:
            assert agent.take(stored) == place.data(stored)
        (held,) = agent.folder.iterdir()
        assert (held / anchor.key).stat().st_size == anchor.bytes
        assert agent.take(delta) == place.data(delta)
        assert agent.unheld == version - 1


def test_what_is_held_is_given_up_where_staging_needs_its_memory(place: Place) -> None:
    agent = place.agent("a")
    agent.take(place.objects[0])
    assert agent.objects.make_room()
    assert not list(agent.folder.iterdir())
    assert agent.unheld == 1
    assert not agent.objects.make_room()


def test_an_object_that_failed_leaves_its_memory_to_the_next_one(place: Place) -> None:
    agent = place.agent("a")
    anchor = place.objects[0]
    agent.room = anchor.bytes
    agent.objects.begin(2, 1)
    for _ in range(2):
        with pytest.raises(StoreUnavailableError):
            agent.take(anchor, seconds=-1.0)
    assert agent.take(anchor) == place.data(anchor)
    assert len(list(agent.folder.iterdir())) == 1
    assert agent.unheld == 0
