"""Reads that end at a deadline, whatever the store does."""

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest
from obstore.store import MemoryStore
from trainsync.storage.objects.bucket import ObjectBucket
from trainsync.storage.objects.errors import ObjectMissingError, StoreUnavailableError
from trainsync.storage.objects.opening import StoreOptions, open_store

SECONDS = 20.0
CREDENTIALS = {"access_key_id": "key", "secret_access_key": "secret"}
READS: dict[str, Callable[[ObjectBucket], object]] = {
    "get": lambda bucket: bucket.get("key"),
    "look": lambda bucket: bucket.look("key", None),
    "size": lambda bucket: bucket.size("key"),
    "range": lambda bucket: bucket.range("key", 10, 0, 5),
    "blocks": lambda bucket: list(bucket.blocks("key", 10)),
}


class Silent:
    """A server that takes requests, begins an answer where it has one, and says no more."""

    def __init__(self) -> None:
        self.answer = b""
        self.asked = 0
        self.left = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.endpoint = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._run, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._take, args=(connection,), daemon=True).start()

    def _take(self, connection: socket.socket) -> None:
        while connection.recv(1 << 16):
            self.asked += 1
            connection.sendall(self.answer)
        self.left.set()


@pytest.fixture
def silent() -> Iterator[Silent]:
    server = Silent()
    yield server
    server.close()


@pytest.fixture
def bucket(silent: Silent) -> ObjectBucket:
    """With the usual bounds: half a minute for an answer, and more tries for 90 s."""
    options = StoreOptions(silent.endpoint, "us-east-1", True, CREDENTIALS)
    return open_store("s3://bucket/a", options)


@pytest.mark.parametrize("read", READS)
def test_a_server_that_does_not_answer_is_given_up_at_the_deadline(
    read: str, silent: Silent, bucket: ObjectBucket
) -> None:
    began = time.monotonic()
    with pytest.raises(StoreUnavailableError, match="key: it did not answer in time"):
        READS[read](bucket.until(began + 0.5))
    assert 0.4 < time.monotonic() - began < SECONDS
    assert silent.left.wait(SECONDS), "the request goes on"


@pytest.mark.parametrize("read", ["get", "range"])
def test_an_answer_that_stops_amid_its_bytes_is_given_up_at_the_deadline(
    read: str, silent: Silent, bucket: ObjectBucket
) -> None:
    lines = [
        "HTTP/1.1 206 Partial Content" if read == "range" else "HTTP/1.1 200 OK",
        "Content-Length: 5",
        'ETag: "e"',
        "Last-Modified: Wed, 21 Oct 2015 07:28:00 GMT",
        *(["Content-Range: bytes 0-4/10"] if read == "range" else []),
        "",
        "12",
    ]
    silent.answer = "\r\n".join(lines).encode()
    began = time.monotonic()
    with pytest.raises(StoreUnavailableError, match="key: it did not answer in time"):
        READS[read](bucket.until(began + 0.5))
    assert 0.4 < time.monotonic() - began < SECONDS
    assert silent.asked >= 1


def test_after_the_deadline_nothing_is_asked(silent: Silent, bucket: ObjectBucket) -> None:
    late = bucket.until(time.monotonic())
    for read in READS.values():
        with pytest.raises(StoreUnavailableError, match="it did not answer in time"):
            read(late)
    assert silent.asked == 0


def test_within_the_deadline_reads_are_as_without_one() -> None:
    whole = ObjectBucket(MemoryStore(), "memory")
    whole.create("key", b"0123456789")
    timed = whole.until(time.monotonic() + SECONDS)
    blob = timed.get("key")
    assert blob == whole.get("key")
    assert timed.look("key", blob) is blob
    assert timed.find("other") is None
    assert timed.look("other", None) is None
    assert (timed.size("key"), timed.size("other")) == (10, None)
    assert bytes(timed.range("key", 10, 2, 5)) == b"234"
    assert b"".join(timed.blocks("key", 10)) == b"0123456789"
    with pytest.raises(ObjectMissingError):
        timed.range("other", 10, 0, 5)


def test_readers_in_threads_share_a_deadline(silent: Silent, bucket: ObjectBucket) -> None:
    timed = bucket.until(time.monotonic() + 0.5)
    failed: list[str] = []

    def read() -> None:
        try:
            timed.range("key", 10, 0, 5)
        except StoreUnavailableError as error:
            failed.append(str(error))

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    assert len(failed) == 8
    assert silent.asked == 8
