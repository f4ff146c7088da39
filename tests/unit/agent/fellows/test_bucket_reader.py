"""Versions that are committed in a bucket, between agents over real connections."""

import logging
import os
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch
import xxhash
from obstore.store import MemoryStore
from trainsync.agent.fellows.holding import Holding
from trainsync.agent.fellows.reader import FellowsBucketReader
from trainsync.agent.fellows.versions import HeldVersions
from trainsync.api.protocol import Fellow, SaveKind
from trainsync.storage.objects.bucket import ObjectBucket
from trainsync.storage.objects.manifests import Stored
from trainsync.storage.saves.manifest import Manifest
from trainsync.storage.saves.receipts import FileEntry
from trainsync.weights.errors import DigestMismatchError, WeightsUnavailableError

from tests.unit.agent.fellows.part import SECONDS, STALL, Part, read

_SIZES = {"actor/a.pt": 3_000_001, "actor/b.pt": 5, "actor/empty": 0}
_SIZE = sum(_SIZES.values())
_WITHOUT = {"read": torch.ones(3)}
"""What is read where the memory has no room."""


def _read_bucket(
    bucket: ObjectBucket, stored: Stored, *, deadline: float
) -> Mapping[str, torch.Tensor]:
    return _WITHOUT


class Place:
    """A bucket with a version, and agents."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self.bucket = ObjectBucket(MemoryStore(), "memory")
        self.fellows: list[Fellow] = []
        self.data = {path: os.urandom(size) for path, size in _SIZES.items()}
        keys = {path: f"objects/global_step_1/run-x/{path}" for path in self.data}
        for path, key in keys.items():
            self.bucket.create(key, self.data[path])
        files = tuple(
            FileEntry(path, len(data), f"xxh3-128:{xxhash.xxh3_128_hexdigest(data)}")
            for path, data in self.data.items()
        )
        manifest = Manifest(
            kind=SaveKind.STATE_DICT,
            step=1,
            attempt=0,
            incarnation="0" * 16,
            run_uid="local",
            created_at=datetime.now(UTC),
            participants=(),
            files=files,
        )
        self.stored = Stored(manifest, keys, "sha256:" + "0" * 64)

    def agent(self, name: str, bucket: ObjectBucket | None = None) -> "Taking":
        return Taking(self, self._folder / name, name, bucket or self.bucket, self._stack)

    def held(self, name: str, size: int, data: bytes) -> Holding:
        """What an agent has of the first file: ``size`` bytes of ``data``."""
        holding = Holding(self._folder / name, self.stored.manifest.files)
        holding.path(0).write_bytes(data[:size])
        holding.wrote(0, size)
        return holding


class Taking(Part):
    """An agent's part that reads versions."""

    def __init__(
        self, place: Place, folder: Path, name: str, bucket: ObjectBucket, stack: ExitStack
    ) -> None:
        super().__init__(lambda: place.fellows, name, stack)
        self._place = place
        self.folder = folder
        held = HeldVersions(folder, self.known, self.server, self.metrics, STALL, self.room_beside)
        self.reader = FellowsBucketReader(read, _read_bucket, held)
        self._bucket = bucket
        stack.callback(self.reader.close)

    def take(self, seconds: float = SECONDS) -> Mapping[str, torch.Tensor]:
        return self.reader(self._bucket, self._place.stored, deadline=time.monotonic() + seconds)

    def has_all(self, found: Mapping[str, torch.Tensor]) -> bool:
        return {path: t.numpy().tobytes() for path, t in found.items()} == self._place.data

    @property
    def sources(self) -> tuple[float, float]:
        """Bytes from the bucket and from fellows."""
        return self.fetched("store"), self.fetched("fellow")


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with ExitStack() as stack:
        yield Place(tmp_path, stack)


def test_the_head_of_a_chain_alone_reads_the_bucket_and_the_log_says_so(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    nothing = ObjectBucket(MemoryStore(), "nothing")
    chain = [place.agent("a"), place.agent("b", nothing), place.agent("c", nothing)]
    place.fellows = [agent.fellow for agent in chain]
    with caplog.at_level(logging.INFO):
        for agent in chain:
            assert agent.has_all(agent.take())
    assert [agent.sources for agent in chain] == [(_SIZE, 0), (0, _SIZE), (0, _SIZE)]
    assert [agent.failures for agent in chain] == [0, 0, 0]
    told = [line for line in caplog.messages if line.startswith("version 1: ")]
    assert told == [f"version 1: {_SIZE} bytes from {name}" for name in ("the store", "a", "b")]


def test_fellows_that_take_a_version_at_once_read_it_from_the_bucket_once(place: Place) -> None:
    chain = [place.agent(name) for name in ("a", "b", "c")]
    place.fellows = [agent.fellow for agent in chain]
    got: dict[int, Mapping[str, torch.Tensor]] = {}

    def take(number: int) -> None:
        got[number] = chain[number].take()

    threads = [threading.Thread(target=take, args=(number,)) for number in (2, 1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert all(agent.has_all(got[number]) for number, agent in enumerate(chain))
    assert sum(agent.sources[0] for agent in chain) == _SIZE


@pytest.mark.parametrize("fault", ["away", "has nothing", "stops amid a file", "damages"])
def test_what_a_fellow_does_not_give_comes_from_the_bucket(place: Place, fault: str) -> None:
    head, last = place.agent("a"), place.agent("b")
    place.fellows = [head.fellow]
    first = place.data["actor/a.pt"]
    if fault == "away":
        head.server.close()
    elif fault == "stops amid a file":
        head.server.hold(place.held("held", 1_000_000, first))
    elif fault == "damages":
        other = bytes([first[0] ^ 1]) + first[1:]
        head.server.hold(place.held("held", len(other), other))
    began = time.monotonic()
    assert last.has_all(last.take())
    assert time.monotonic() - began < 5 * STALL
    assert last.sources == (_SIZE, 0)
    assert last.failures == 1


def test_a_bucket_that_has_other_bytes_is_an_error_and_nothing_is_held(place: Place) -> None:
    key = place.stored.keys["actor/b.pt"]
    place.bucket.replace(key, b"12345", place.bucket.get(key))
    head, last = place.agent("a"), place.agent("b")
    place.fellows = [head.fellow]
    with pytest.raises(DigestMismatchError, match=f"{key} has digest"):
        head.take()
    assert not list(head.folder.iterdir())
    with pytest.raises(DigestMismatchError):
        last.take()


@pytest.mark.parametrize("left", [None, b"1234"], ids=["gone", "of another size"])
def test_an_object_that_is_gone_or_replaced_has_the_manifest_looked_at_again(
    place: Place, left: bytes | None
) -> None:
    """`StoredStateDicts` does so where a digest differs."""
    key = place.stored.keys["actor/b.pt"]
    if left is None:
        place.bucket.delete([key])
    else:
        place.bucket.replace(key, left, place.bucket.get(key))
    agent = place.agent("a")
    with pytest.raises(DigestMismatchError, match=key):
        agent.take()
    assert not list(agent.folder.iterdir())


def test_a_bucket_that_is_slow_is_given_up_at_the_deadline(place: Place) -> None:
    with pytest.raises(WeightsUnavailableError, match="could not be read in time"):
        place.agent("a").take(seconds=-1.0)


def test_without_room_in_memory_the_bucket_is_read_as_without_fellows(place: Place) -> None:
    agent = place.agent("a")
    shutil.rmtree(agent.folder)
    assert agent.take() is _WITHOUT
    assert agent.unheld == 1


def test_without_room_beside_staging_nothing_is_held_and_that_is_told_once(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    head, last = place.agent("a"), place.agent("b")
    place.fellows = [head.fellow]
    head.room = _SIZE - 1
    assert head.take() is _WITHOUT
    assert head.take() is _WITHOUT
    assert not list(head.folder.iterdir())
    assert (head.unheld, _told(caplog)) == (2, 1)
    began = time.monotonic()
    assert last.has_all(last.take())
    assert last.sources == (_SIZE, 0)
    assert time.monotonic() - began < STALL / 2, "a fellow that holds nothing says so at once"
    head.room = _SIZE
    assert head.has_all(head.take())
    assert (head.unheld, _told(caplog)) == (2, 1)
    head.room = 0
    assert head.take() is _WITHOUT
    assert (head.unheld, _told(caplog)) == (3, 2)


def test_what_is_held_is_given_up_where_staging_needs_its_memory(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    agent = place.agent("a")
    assert not agent.reader.make_room()
    agent.take()
    assert agent.reader.make_room()
    assert not list(agent.folder.iterdir())
    assert (agent.unheld, _told(caplog)) == (1, 1)
    assert not agent.reader.make_room()


def _told(caplog: pytest.LogCaptureFixture) -> int:
    return sum("not held for fellows" in line for line in caplog.messages)
