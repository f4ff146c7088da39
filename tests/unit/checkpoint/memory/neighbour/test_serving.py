"""What a server gives and takes: whole files, to processes of the run, of its own attempt."""

import errno
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from trainsync.api.protocol import SaveKind
from trainsync.checkpoint.memory.kept import KeptShards, SealedFile
from trainsync.checkpoint.memory.neighbour import wire
from trainsync.checkpoint.memory.neighbour.secret import run_key
from trainsync.checkpoint.memory.neighbour.serving import MemoryServer
from trainsync.checkpoint.memory.neighbour.wire import NeighbourError
from trainsync.checkpoint.memory.place import MemoryPlace
from trainsync.storage import digest

from tests.unit.checkpoint.memory.keeping import INCARNATION, Keeping, digest_of
from tests.waiting import eventually

DATA = b"shard" * 300_000
OTHER = "fedcba9876543210"


class Node:
    """A pod's memory, and the server of one of its processes."""

    def __init__(self, directory: Path, budget: int = 64 << 20) -> None:
        self.keeping = Keeping(directory)
        self.keeping.shards.hold()
        self.place = MemoryPlace(self.keeping.place.directory / "guests", budget)
        self.guests = KeptShards(self.place, self.keeping.shared, 0, INCARNATION)
        self.guests.hold()
        self.key = run_key(self.keeping.run)
        places = [self.keeping.place, self.place]
        self.taken: list[SealedFile] = []
        self.server = MemoryServer(self.key, places, self.guests, 0, INCARNATION, self.taken.append)

    def put(
        self,
        data: bytes,
        key: bytes | None = None,
        about: bytes = b"",
        told: int | None = None,
        **changes: Any,
    ) -> None:
        request = {
            "want": "put",
            "attempt": 0,
            "incarnation": INCARNATION,
            "step": 5,
            "component": "model",
            "rank": 1,
            "bytes": len(data),
            "digest": digest_of(data),
            "about": len(about) if told is None else told,
            "about_digest": digest.manifest_digest(about),
        }
        with wire.connect(self.server.address) as connection:
            wire.ask(connection, self.key if key is None else key, {**request, **changes})
            connection.sendall(data + about)
            wire.receive(connection, "kept")

    def get(self, wanted: str) -> bytes:
        found = bytearray()
        with wire.connect(self.server.address) as connection:
            welcome = wire.ask(connection, self.key, {"want": "get", "digest": wanted})
            wire.receive_file(connection, welcome["bytes"], found.extend)
        return bytes(found)

    def held(self) -> list[str]:
        return [kept.name for kept in self.place.files()]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    (tmp_path / "run").mkdir()
    made = Node(tmp_path)
    yield made
    made.server.close()


def test_a_copy_is_taken_and_given_back(node: Node) -> None:
    node.put(DATA)
    assert node.get(digest_of(DATA)) == DATA
    assert node.server.taken_bytes == len(DATA)


def test_what_is_told_beside_a_copy_is_passed_on_once_the_copy_is_whole(node: Node) -> None:
    about = b"{}" * 1_000_000
    node.put(DATA, about=about)
    (file,) = node.taken
    assert file.path.read_bytes() == DATA
    assert (file.step, file.bytes, file.digest) == (5, len(DATA), digest_of(DATA))
    assert file.describe(file) == about


def test_what_is_told_beside_a_copy_and_was_changed_on_the_way_leaves_nothing(node: Node) -> None:
    with pytest.raises(NeighbourError, match="came damaged"):
        node.put(DATA, about=b"{}", about_digest=digest.manifest_digest(b"[]"))
    assert node.held() == node.taken == []


def test_more_beside_a_copy_than_is_taken_is_refused_before_it_is_sent(node: Node) -> None:
    for more in (wire.LONGEST_ABOUT + 1, -1):
        with pytest.raises(NeighbourError, match="would follow the file"):
            node.put(DATA, told=more)
    assert node.held() == node.taken == []


def test_equal_bytes_of_a_later_step_are_taken_and_outlive_the_older_ones(node: Node) -> None:
    node.put(DATA, step=5)
    with pytest.raises(NeighbourError, match="here already"):
        node.put(DATA, step=5)
    node.put(DATA, step=6)
    node.guests.ended(SaveKind.CHECKPOINT, 6, committed=True)
    assert node.get(digest_of(DATA)) == DATA


def test_a_copy_is_written_into_the_memory_of_one_that_is_not_needed_any_more(node: Node) -> None:
    def inode(step: int) -> int:
        (kept,) = [kept for kept in node.place.files() if kept.step == step]
        return node.place.path(kept).stat().st_ino

    node.put(DATA, step=5)
    first = inode(5)
    node.put(DATA + b"6", step=6)
    node.guests.ended(SaveKind.CHECKPOINT, 6, committed=True)
    with pytest.raises(NeighbourError, match="no file of digest"):
        node.get(digest_of(DATA))
    node.put(DATA[:-1] + b"7", step=7)
    assert inode(7) == first
    assert node.get(digest_of(DATA[:-1] + b"7")) == DATA[:-1] + b"7"


def test_what_the_pod_itself_keeps_is_given(node: Node) -> None:
    node.keeping.keep(5, DATA)
    assert node.get(digest_of(DATA)) == DATA


def test_what_is_not_there_is_refused(node: Node) -> None:
    with pytest.raises(NeighbourError, match="no file of digest"):
        node.get(digest_of(DATA))


def test_a_byte_that_changed_on_the_way_leaves_nothing(node: Node) -> None:
    with pytest.raises(NeighbourError, match="its digest is"):
        node.put(DATA, digest=digest_of(DATA + b"."))
    assert node.held() == []


@pytest.mark.parametrize("changes", [{"attempt": 1}, {"incarnation": OTHER}])
def test_copies_of_another_attempt_are_refused(node: Node, changes: dict[str, Any]) -> None:
    with pytest.raises(NeighbourError, match="it is of attempt"):
        node.put(DATA, **changes)
    assert node.held() == []


def test_a_process_without_the_runs_key_gets_and_leaves_nothing(node: Node) -> None:
    with pytest.raises(NeighbourError):
        node.put(DATA, key=b"another")
    assert node.held() == []


def test_a_server_without_the_runs_key_is_not_given_a_file(node: Node) -> None:
    node.server.close()
    false = MemoryServer(b"another", [node.place], node.guests, 0, INCARNATION)
    with wire.connect(false.address) as connection, pytest.raises(NeighbourError):
        wire.ask(connection, node.key, {"want": "get", "digest": digest_of(DATA)})
    false.close()


def test_a_copy_beyond_the_budget_is_refused_before_it_is_sent(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    small = Node(tmp_path, budget=len(DATA) - 1)
    with pytest.raises(NeighbourError, match="no room"):
        small.put(DATA)
    assert small.held() == []
    small.server.close()


def test_a_sender_that_dies_amid_a_copy_leaves_nothing(node: Node) -> None:
    with wire.connect(node.server.address) as connection:
        request = {
            "want": "put",
            "attempt": 0,
            "incarnation": INCARNATION,
            "step": 5,
            "component": "model",
            "rank": 1,
            "bytes": len(DATA),
            "digest": digest_of(DATA),
            "about": 0,
            "about_digest": digest.manifest_digest(b""),
        }
        wire.ask(connection, node.key, request)
        connection.sendall(DATA[:100_000])
        eventually(lambda: len(node.held()) == 1)
        connection.shutdown(socket.SHUT_RDWR)
    eventually(lambda: node.held() == [])


def test_a_copy_that_finds_no_space_amid_its_bytes_is_refused_and_leaves_nothing(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, written = os.write, 0

    def write(fd: int, data: memoryview) -> int:
        nonlocal written
        if len(data) < 1000:  # other threads' own
            return real(fd, data)
        written += 1
        if written == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data)

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(NeighbourError, match="no room"):
        node.put(DATA)
    assert written == 2
    assert node.held() == []


def test_bytes_after_those_that_were_promised_are_not_kept(node: Node) -> None:
    whole = DATA + b"more" * 1000
    node.put(whole, bytes=len(DATA), digest=digest_of(DATA))
    assert node.get(digest_of(DATA)) == DATA


def test_a_frame_that_is_too_long_ends_the_connection(node: Node) -> None:
    with wire.connect(node.server.address) as connection:
        wire.receive(connection, "challenge", time.monotonic() + 10)
        connection.sendall(b"\xff\xff\xff\xff")
        assert connection.recv(1) == b""


def test_the_first_process_makes_the_runs_key_and_others_read_it(node: Node) -> None:
    path = node.keeping.run.memory_key
    assert run_key(node.keeping.run) == node.key
    assert path.stat().st_mode & 0o007 == 0
    path.write_bytes(b"short")
    with pytest.raises(OSError, match="expected a key"):
        run_key(node.keeping.run)
