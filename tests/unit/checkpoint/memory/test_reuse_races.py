"""Readers beside a process that writes into dropped files again: no byte changes under a reader."""

import shutil
import tempfile
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from trainsync.api.protocol import SaveKind
from trainsync.checkpoint.memory.kept import KeptFile
from trainsync.storage.saves.receipts import Participant

from tests.unit.checkpoint.memory.keeping import Keeping, bytes_of, digest_of, mapped

PARTS = [Participant("model", 0), Participant("model", 1)]
SIZE = 5000
BUDGET = 5 * SIZE


def data_of(step: int, part: int, again: int = 0) -> bytes:
    return bytes([step % 256, part, again]) * (SIZE // 3)


class Reuse(RuleBasedStateMachine):
    """Two processes of one pod, which save, hear of commits or not, and die; and readers."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp())
        self.ranks = [Keeping(self.directory, budget=BUDGET) for _ in PARTS]
        self.step = 0
        self.again = 0
        self.committed: int | None = None
        self.writing: dict[int, tuple[KeptFile, bytes, int]] = {}
        self.read: list[tuple[torch.Tensor, str]] = []

    @rule()
    def next_step(self) -> None:
        self.step += 1

    @precondition(lambda self: self.step)
    @rule(part=st.sampled_from([0, 1]))
    def begin(self, part: int) -> None:
        """Also anew: the process died, and one of the same incarnation saves once more."""
        self.again += 1
        data = data_of(self.step, part, self.again % 256)
        file = self.ranks[part].shards.begin(self.step, PARTS[part], len(data))
        self.writing.pop(part, None)
        if file is not None:
            file.write(memoryview(data)[: SIZE // 2])
            self.writing[part] = file, data, self.step

    @rule(part=st.sampled_from([0, 1]), whole=st.booleans())
    def end(self, part: int, whole: bool) -> None:
        if part in self.writing:
            file, data, _ = self.writing.pop(part)
            if whole:
                file.write(memoryview(data)[SIZE // 2 :])
                file.seal(digest_of(data))
            else:
                file.discard()

    @precondition(lambda self: self.step)
    @rule(heard=st.sets(st.sampled_from([0, 1])))
    def commit(self, heard: set[int]) -> None:
        if not any(step == self.step for _, _, step in self.writing.values()):
            self.committed = self.step
            self.ranks[0].commit(self.step)
            for rank in heard:
                self.ranks[rank].shards.ended(SaveKind.CHECKPOINT, self.step, True)

    @rule()
    def save(self) -> None:
        """A whole save of both, of whose commit both hear."""
        self.next_step()
        for part in range(len(PARTS)):
            self.begin(part)
            self.end(part, whole=True)
        self.commit({0, 1})

    @precondition(lambda self: self.step and self.step != self.committed)
    @rule(rank=st.sampled_from([0, 1]))
    def abort(self, rank: int) -> None:
        self.ranks[rank].shards.ended(SaveKind.CHECKPOINT, self.step, False)

    @rule(which=st.integers(0, 7))
    def open(self, which: int) -> None:
        whole = [kept for kept in self.ranks[0].names() if kept.digest is not None]
        if whole:
            kept = whole[which % len(whole)]
            assert kept.digest is not None
            self.read.append((mapped(self.ranks[0].place.path(kept)), kept.digest))

    @rule(which=st.integers(0, 7))
    def close(self, which: int) -> None:
        if self.read:
            del self.read[which % len(self.read)]

    @invariant()
    def what_is_read_stays(self) -> None:
        assert all(digest_of(bytes_of(view)) == digest for view, digest in self.read)

    @invariant()
    def names_tell_the_truth(self) -> None:
        place = self.ranks[0].place
        for kept in self.ranks[0].names():
            if kept.digest is not None:
                assert digest_of(place.path(kept).read_bytes()) == kept.digest

    @invariant()
    def the_budget_is_kept(self) -> None:
        place = self.ranks[0].place
        files = list(place.files())
        assert sum(place.path(kept).stat().st_size for kept in files) <= BUDGET
        spares = [kept.part for kept in files if kept.is_spare]
        assert len(spares) == len(set(spares))

    def teardown(self) -> None:
        self.read.clear()
        shutil.rmtree(self.directory)


TestReuse = Reuse.TestCase
TestReuse.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.fixture
def beside_disk() -> Iterator[Path]:
    """A directory in the memory file system, where pages are as in a pod."""
    directory = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield directory
    shutil.rmtree(directory)


def test_readers_that_open_map_and_close_all_the_time_see_whole_files(beside_disk: Path) -> None:
    keeping = Keeping(beside_disk)
    steps = 300
    wrong: list[str] = []
    over = threading.Event()
    read = [0, 0, 0]

    def reader(number: int) -> None:
        while not over.is_set():
            for kept in keeping.names():
                if kept.digest is None:
                    continue
                with suppress(FileNotFoundError, BlockingIOError):
                    view = mapped(keeping.place.path(kept))
                    found = {digest_of(bytes_of(view)) for _ in range(3)}
                    if found != {kept.digest}:
                        wrong.append(kept.name)
                    del view
                    read[number] += 1

    threads = [threading.Thread(target=reader, args=(number,)) for number in range(len(read))]
    for thread in threads:
        thread.start()
    inodes = set()
    try:
        for step in range(1, steps + 1):
            keeping.keep(step, data_of(step, 0, step // 256) * 10)
            inodes.add(keeping.inode(step))
            keeping.shards.ended(SaveKind.CHECKPOINT, step, True)
    finally:
        over.set()
        for thread in threads:
            thread.join(30)
    assert wrong == []
    assert all(read)
    assert len(inodes) < steps  # some were written again, beside the readers
