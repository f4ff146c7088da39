"""Files between agents over real connections, with fellows that fail in each way."""

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch
from trainsync.agent.fellows.fetching import FellowFailedError, from_fellow
from trainsync.agent.fellows.holding import Holding, HoldingClosedError, version_key
from trainsync.agent.fellows.reader import FellowsReader
from trainsync.agent.fellows.versions import HeldVersions
from trainsync.api.protocol import Fellow, SaveKind
from trainsync.storage.digest import file_digest
from trainsync.storage.saves.manifest import Manifest
from trainsync.storage.saves.receipts import FileEntry
from trainsync.weights.errors import DigestMismatchError

from tests.unit.agent.fellows.part import KEY, SECONDS, STALL, Part, read


class Place:
    """A volume with a step, and agents."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack
        self.fellows: list[Fellow] = []
        self.volume = folder / "global_step_1"
        (self.volume / "actor").mkdir(parents=True)
        self.sizes = {"actor/a.pt": 3_000_001, "actor/b.pt": 5, "actor/empty": 0}
        for path, size in self.sizes.items():
            (self.volume / path).write_bytes(os.urandom(size))
        self.manifest = Manifest(
            kind=SaveKind.STATE_DICT,
            step=1,
            attempt=0,
            incarnation="0" * 16,
            run_uid="local",
            created_at=datetime.now(UTC),
            participants=(),
            files=tuple(
                FileEntry(path, size, file_digest(self.volume / path))
                for path, size in self.sizes.items()
            ),
        )

    @property
    def size(self) -> int:
        return sum(self.sizes.values())

    def agent(self, name: str, key: str = KEY) -> "Taking":
        return Taking(self, self._folder / name, name, key, self._stack)


class Taking(Part):
    """An agent's part that reads versions."""

    def __init__(self, place: Place, folder: Path, name: str, key: str, stack: ExitStack) -> None:
        super().__init__(lambda: place.fellows, name, stack, key)
        self._place = place
        held = HeldVersions(folder, self.known, self.server, self.metrics, STALL, self.room_beside)
        self.reader = FellowsReader(read, held)
        stack.callback(self.reader.close)

    def take(self, directory: Path | None = None) -> Mapping[str, torch.Tensor]:
        place = self._place
        return self.reader(
            directory or place.volume, place.manifest, deadline=time.monotonic() + SECONDS
        )


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    with ExitStack() as stack:
        yield Place(tmp_path, stack)


def test_the_head_of_a_chain_alone_reads_the_volume(place: Place, tmp_path: Path) -> None:
    chain = [place.agent(name) for name in ("a", "b", "c")]
    place.fellows = [agent.fellow for agent in chain]
    expected = chain[0].take()
    for agent in chain[1:]:
        got = agent.take(tmp_path / "no-volume")
        assert all(torch.equal(got[path], tensor) for path, tensor in expected.items())
    assert [agent.fetched("volume") for agent in chain] == [place.size, 0, 0]
    assert [agent.fetched("fellow") for agent in chain] == [0, place.size, place.size]
    assert [agent.failures for agent in chain] == [0, 0, 0]


def test_bytes_go_on_before_the_file_is_whole(place: Place, tmp_path: Path) -> None:
    head, last = place.agent("a"), place.agent("b")
    holding = Holding(tmp_path / "held", place.manifest.files)
    head.server.hold(holding)
    entry = holding.files[0]
    data = (place.volume / entry.path).read_bytes()
    copy = Holding(tmp_path / "copy", place.manifest.files)
    half = entry.bytes // 2
    holding.path(0).write_bytes(data[:half])
    holding.wrote(0, half)
    end = time.monotonic() + SECONDS
    arguments = (head.fellow, KEY, copy, 0, 10 * STALL, end)
    thread = threading.Thread(target=from_fellow, args=arguments)
    thread.start()
    while copy.there(0, half - 1, end) < half:
        assert time.monotonic() < end
    holding.path(0).write_bytes(data)
    holding.wrote(0, entry.bytes)
    thread.join(SECONDS)
    assert copy.path(0).read_bytes() == data
    assert last.failures == 0


def _listening(answer: Callable[[socket.socket], None], stack: ExitStack) -> Fellow:
    """A fellow in whose place something else answers each connection."""
    listener = socket.create_server(("127.0.0.1", 0))
    stack.callback(listener.close)

    def run() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            answer(connection)

    threading.Thread(target=run, daemon=True).start()
    return Fellow(name="a", address=f"127.0.0.1:{listener.getsockname()[1]}")


@pytest.mark.parametrize("fault", ["silent", "closes", "garbage", "nothing there"])
def test_a_fellow_that_does_not_answer_costs_a_stall_and_no_more(place: Place, fault: str) -> None:
    kept: list[socket.socket] = []
    answers: dict[str, Callable[[socket.socket], None]] = {
        "silent": kept.append,
        "closes": lambda connection: connection.close(),
        "garbage": lambda connection: connection.sendall(b"\xff" * 64),
    }
    last = place.agent("b")
    with ExitStack() as stack:
        if fault == "nothing there":
            place.fellows = [Fellow(name="a", address="127.0.0.1:1")]
        else:
            place.fellows = [_listening(answers[fault], stack)]
        began = time.monotonic()
        last.take()
        assert time.monotonic() - began < 5 * STALL
    assert (last.fetched("volume"), last.fetched("fellow")) == (place.size, 0)
    assert last.failures == 1


def test_a_fellow_with_another_key_gives_and_gets_nothing(place: Place, tmp_path: Path) -> None:
    other, last = place.agent("a", secrets.token_hex(32)), place.agent("b")
    other.take()
    place.fellows = [other.fellow]
    last.take()
    assert last.fetched("fellow") == 0
    copy = Holding(tmp_path / "copy", place.manifest.files)
    with pytest.raises(FellowFailedError, match="does not give it") as caught:
        from_fellow(other.fellow, KEY, copy, 0, STALL, time.monotonic() + SECONDS)
    assert KEY not in str(caught.value)
    assert copy.path(0).stat().st_size == 0


def test_a_file_that_a_fellow_gives_with_other_bytes_is_not_taken(
    place: Place, tmp_path: Path
) -> None:
    head, last = place.agent("a"), place.agent("b")
    place.fellows = [head.fellow]
    head.take()
    holding = Holding(tmp_path / "held", place.manifest.files)
    for index, entry in enumerate(holding.files):
        holding.path(index).write_bytes(bytes(entry.bytes))
        holding.wrote(index, entry.bytes)
    head.server.hold(holding)
    got = last.take()
    assert got["actor/b.pt"].numpy().tobytes() == (place.volume / "actor/b.pt").read_bytes()
    assert (last.fetched("volume"), last.failures) == (place.size, 1)


def test_a_fellow_that_stops_amid_a_file_is_replaced_by_the_next_one(
    place: Place, tmp_path: Path
) -> None:
    whole, torn, last = place.agent("a"), place.agent("b"), place.agent("c")
    place.fellows = [whole.fellow, torn.fellow]
    whole.take()
    holding = Holding(tmp_path / "held", place.manifest.files)
    holding.path(0).write_bytes((place.volume / "actor/a.pt").read_bytes()[:1000])
    holding.wrote(0, 1000)
    torn.server.hold(holding)
    last.take(tmp_path / "no-volume")
    assert (last.fetched("fellow"), last.failures) == (place.size, 1)


def test_a_volume_with_other_bytes_is_an_error_and_nothing_is_held(place: Place) -> None:
    (place.volume / "actor/b.pt").write_bytes(b"12345")
    head, last = place.agent("a"), place.agent("b")
    place.fellows = [head.fellow]
    with pytest.raises(DigestMismatchError, match="expected xxh3-128"):
        head.take()
    with pytest.raises(DigestMismatchError):
        last.take()


def test_a_newer_version_takes_the_memory_of_the_one_before(place: Place, tmp_path: Path) -> None:
    head = place.agent("a")
    head.take()
    head.take()
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["2"]
    head.server.close()
    assert not list((tmp_path / "a").iterdir())


def test_waiting_for_a_holding_ends_with_it(place: Place, tmp_path: Path) -> None:
    holding = Holding(tmp_path / "held", place.manifest.files)
    threading.Timer(0.1, holding.close).start()
    with pytest.raises(HoldingClosedError):
        holding.there(0, 0, time.monotonic() + SECONDS)


def test_without_room_in_memory_the_volume_is_read_as_without_fellows(
    place: Place, tmp_path: Path
) -> None:
    agent = place.agent("a")
    agent.reader.close()  # the folder is gone: nothing can be written there
    assert set(agent.take()) == set(place.sizes)
    assert agent.unheld == 1


def test_without_room_beside_staging_the_volume_is_read_as_without_fellows(
    place: Place, tmp_path: Path
) -> None:
    agent = place.agent("a")
    agent.room = place.size - 1
    assert set(agent.take()) == set(place.sizes)
    assert not list((tmp_path / "a").iterdir())
    assert agent.unheld == 1


def test_versions_have_one_key_where_all_files_are_equal(place: Place) -> None:
    files = place.manifest.files
    assert version_key(files) == version_key(list(files))
    assert version_key(files) != version_key(files[:-1])
