"""What the library asks of a store: the same of each kind of server."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from obstore.store import MemoryStore
from trainsync.api.protocol import SaveKind
from trainsync.storage.objects import commits
from trainsync.storage.objects.bucket import ObjectBucket
from trainsync.storage.objects.errors import (
    ObjectChangedError,
    ObjectExistsError,
    ObjectMissingError,
    UnconditionalStoreError,
)
from trainsync.storage.objects.opening import StoreOptions, open_store
from trainsync.storage.objects.probe import require_conditional_puts

from tests.store.conftest import FAST, Place
from tests.waiting import eventually

PART = 5 << 20


@pytest.fixture(params=["memory", "versitygw", "azurite", "gcs", "minio"])
def bucket(request: pytest.FixtureRequest) -> ObjectBucket:
    if request.param == "minio":
        found: ObjectBucket = request.getfixturevalue("minio_bucket")
        return found
    if request.param == "memory":
        return ObjectBucket(MemoryStore(), "memory://", FAST)
    if request.param == "azurite":
        url = request.getfixturevalue("container")
        return open_store(f"{url}/runs/a", StoreOptions(limits=FAST))
    if request.param == "gcs":
        url = request.getfixturevalue("gcs_bucket")
        return open_store(f"{url}/runs/a", StoreOptions(limits=FAST))
    place: Place = request.getfixturevalue("place")
    return place.open()


def test_it_honours_conditional_puts(bucket: ObjectBucket) -> None:
    require_conditional_puts(bucket)
    assert bucket.below("probe") == []


def test_an_object_is_made_once(bucket: ObjectBucket) -> None:
    bucket.create("a/b", b"one")
    bucket.create("a/b", b"one")  # the very same is one's own
    with pytest.raises(ObjectExistsError, match="a/b is there already"):
        bucket.create("a/b", b"two")
    assert bucket.get("a/b").data == b"one"


def test_an_object_is_replaced_only_as_it_was_read(bucket: ObjectBucket) -> None:
    bucket.create("p", b"1")
    old = bucket.get("p")
    bucket.replace("p", b"2", old)
    with pytest.raises(ObjectChangedError, match="has replaced p"):
        bucket.replace("p", b"3", old)
    assert bucket.get("p").data == b"2"
    with pytest.raises(ObjectChangedError):
        bucket.replace("none", b"3", old)
    assert bucket.find("none") is None


def test_an_object_that_stays_is_known_again(bucket: ObjectBucket) -> None:
    assert bucket.look("p", None) is None
    bucket.create("p", b"1")
    known = bucket.look("p", None)
    assert known is not None
    assert bucket.look("p", known) is known
    bucket.replace("p", b"2", known)
    found = bucket.look("p", known)
    assert found is not None
    assert found.data == b"2"
    bucket.delete(["p"])
    assert bucket.look("p", found) is None


def test_of_many_that_make_one_object_one_wins(bucket: ObjectBucket) -> None:
    won: list[int] = []

    def make(number: int) -> None:
        try:
            bucket.create("claim", f"{number}".encode())
        except ObjectExistsError:
            return
        won.append(number)

    threads = [threading.Thread(target=make, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [bucket.get("claim").data] == [str(number).encode() for number in won]


def test_a_pointer_that_many_move_names_the_newest_and_never_goes_back(
    bucket: ObjectBucket,
) -> None:
    steps = [*range(1, 9)]
    problems: list[BaseException] = []
    seen: list[int] = []
    done = threading.Event()

    def move(step: int) -> None:
        try:
            commits.move_pointer(bucket, SaveKind.CHECKPOINT, step)
        except BaseException as error:  # noqa: BLE001
            problems.append(error)

    def watch() -> None:
        while not done.is_set():
            step = commits.read_pointer(bucket, SaveKind.CHECKPOINT)
            if step is not None:
                seen.append(step)

    watcher = threading.Thread(target=watch)
    threads = [threading.Thread(target=move, args=(step,)) for step in steps]
    watcher.start()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    done.set()
    watcher.join()
    assert problems == []
    assert commits.read_pointer(bucket, SaveKind.CHECKPOINT) == 8
    assert seen == sorted(seen)
    assert not commits.move_pointer(bucket, SaveKind.CHECKPOINT, 3)


@pytest.mark.parametrize("size", [0, 1, PART - 1, PART, PART + 1, 4 * PART + 17])
def test_an_object_of_any_size_comes_back_as_it_was(bucket: ObjectBucket, size: int) -> None:
    data = bytes(range(251)) * (size // 251 + 1)
    data = data[:size]
    blocks = (data[start : start + 700_001] for start in range(0, size, 700_001))
    bucket.upload("o", iter(blocks), size)
    assert b"".join(bucket.blocks("o", size)) == data
    with pytest.raises(ObjectChangedError):
        list(bucket.blocks("o", size + 1))


def test_an_upload_whose_source_fails_leaves_no_object_and_no_parts(place: Place) -> None:
    def blocks() -> Iterator[bytes]:
        yield b"x" * (3 * PART)
        # A part that is on its way when the upload is aborted may land after that.
        eventually(lambda: [file.stat().st_size for file in place.parts_left()] == [PART] * 3, 30)
        raise ValueError("the disk")

    with pytest.raises(ValueError, match="the disk"):
        place.open().upload("o", blocks(), 4 * PART)
    assert place.objects() == []
    assert place.parts_left() == []


def test_a_listing_shows_one_level_and_more_than_one_page(bucket: ObjectBucket) -> None:
    # S3 has 1,000 on a page, the front before fake-gcs-server 100. Azure has 5,000, and azurite is
    # slow.
    count = {"az": 60, "gs": 150}.get(bucket.name[:2], 1100)
    names = [f"m/{number:04}" for number in range(count)]
    threads = [
        threading.Thread(target=lambda some=some: [bucket.create(key, b"x") for key in some])  # type: ignore[misc]
        for some in (names[start::8] for start in range(8))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    bucket.create("m/deep/er", b"x")
    assert [info.key for info in bucket.objects("m")] == names
    assert bucket.folders("m") == ["m/deep"]
    assert bucket.folders("") == ["m"]
    assert len(bucket.below("m")) == count + 1
    bucket.delete([*names, "m/deep/er", "m/never"])
    assert bucket.below("m") == []


def test_what_is_missing_is_said(bucket: ObjectBucket) -> None:
    with pytest.raises(ObjectMissingError, match="there is no such object"):
        bucket.get("none")
    with pytest.raises(ObjectMissingError):
        list(bucket.blocks("none", 5))
    assert bucket.find("none") is None
    bucket.delete(["none"])


def test_a_directory_by_url_is_read_and_takes_no_commits(tmp_path: Path) -> None:
    bucket = open_store(f"file://{tmp_path}")
    (tmp_path / "a").write_bytes(b"data")
    assert bucket.get("a").data == b"data"
    with pytest.raises(UnconditionalStoreError, match="a directory is given without file://"):
        require_conditional_puts(bucket)


def test_a_large_object_takes_little_memory_on_its_way(place: Place) -> None:
    # In a process of its own: the peak of this one is others' doing.
    code = """
import resource, sys
from trainsync.storage.objects.bucket import Limits
from trainsync.storage.objects.opening import StoreOptions, open_store
bucket = open_store(sys.argv[1], StoreOptions(limits=Limits(part_bytes=5 << 20, parts=3)))
size, block = 256 << 20, bytes(1 << 20)
bucket.upload("small", iter([block] * 20), 20 << 20)
list(map(len, bucket.blocks("small", 20 << 20)))
peak = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
before = peak()
bucket.upload("large", (block for _ in range(256)), size)
assert sum(map(len, bucket.blocks("large", size))) == size
print(peak() - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, place.url()],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert int(done.stdout) < 60, "MiB more than an object of 20 MiB takes"
