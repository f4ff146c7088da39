"""What a server has acknowledged outlives its kill -9; the rest is whole, or not there."""

import os
import secrets
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from trainsync.storage.objects.bucket import ObjectBucket
from trainsync.storage.objects.errors import (
    ObjectChangedError,
    ObjectExistsError,
    StoreUnavailableError,
)
from trainsync.storage.objects.opening import StoreOptions, open_store

from tests.store.conftest import FAST
from tests.store.servers.server import ACCESS, REGION, SECRET, Server, serving
from tests.waiting import eventually

MIB = 1 << 20
WRITERS = 4


def open_at(server: Server, name: str) -> ObjectBucket:
    options = StoreOptions(
        endpoint=server.endpoint,
        region=REGION,
        allow_http=True,
        credentials={"access_key_id": ACCESS, "secret_access_key": SECRET},
        limits=FAST,
    )
    return open_store(f"s3://{name}/runs/a", options)


def data_of(key: str, size: int) -> bytes:
    """Bytes of that key alone."""
    return (key.encode() * (size // len(key) + 1))[:size]


def put_until_it_dies(put: Callable[[int], None]) -> None:
    number = 0
    while True:
        try:
            put(number)
        except StoreUnavailableError:
            return
        number += 1


@pytest.mark.parametrize("after", [9, 25, 60])
def test_a_server_that_is_killed_has_what_it_acknowledged(
    server: Server, tmp_path: Path, after: int
) -> None:
    name, root = f"bucket-{secrets.token_hex(6)}", tmp_path / "server/data"
    acknowledged: dict[str, int] = {}
    pointer: list[int] = []
    with serving(server.program, root) as first:
        first.bucket(name)
        bucket = open_at(first, name)

        def put(writer: int, number: int) -> None:
            key, size = f"w{writer}/{number:04}", 700 if number % 2 else 11 * MIB
            if number % 2:
                bucket.create(key, data_of(key, size))
            else:
                bucket.upload(key, iter([data_of(key, size)]), size)
            acknowledged[key] = size

        def move(number: int) -> None:
            if number == 0:
                bucket.create("pointer", b"0")
            else:
                bucket.replace("pointer", str(number).encode(), bucket.get("pointer"))
            pointer.append(number)

        threads = [
            threading.Thread(target=put_until_it_dies, args=(partial(put, writer),))
            for writer in range(WRITERS)
        ]
        threads.append(threading.Thread(target=put_until_it_dies, args=(move,)))
        for thread in threads:
            thread.start()
        eventually(
            lambda: acknowledged and pointer and len(acknowledged) + len(pointer) >= after, 60
        )
        os.kill(first.pid, signal.SIGKILL)
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
    with serving(server.program, root) as second:
        bucket = open_at(second, name)
        there = {info.key: info.bytes for info in bucket.below("") if info.key != "pointer"}
        assert acknowledged.items() <= there.items()
        for key, size in there.items():
            assert b"".join(bucket.blocks(key, size)) == data_of(key, size), key
            assert size in (700, 11 * MIB), "it is whole"
        found = bucket.get("pointer")
        assert int(found.data) in (pointer[-1], pointer[-1] + 1)
        key = min(acknowledged)
        with pytest.raises(ObjectExistsError):
            bucket.create(key, b"another")
        bucket.replace("pointer", b"next", found)
        with pytest.raises(ObjectChangedError):
            bucket.replace("pointer", b"other", found)
