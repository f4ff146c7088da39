"""A state is put into memory whole or not at all, and read from there as often as is asked for."""

import io
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import BinaryIO

import pytest
import torch
from trainsync.checkpoint.errors import SaveAbandonedError
from trainsync.checkpoint.memory.writing import FileInMemory, put_into_memory
from trainsync.checkpoint.save import ending
from trainsync.checkpoint.save.files.dumping import dump

from tests.unit.checkpoint.memory.keeping import MODEL, Keeping, digest_of

STATE = {"w": torch.arange(3_000_000.0), "lr": 0.1}


@pytest.fixture
def keeping(tmp_path: Path) -> Keeping:
    return Keeping(tmp_path)


def archive() -> bytes:
    buffer = io.BytesIO()
    dump(STATE, buffer)
    return buffer.getvalue()


def test_a_state_in_memory_is_the_file_that_torch_writes(keeping: Keeping) -> None:
    file = keeping.shards.begin(5, MODEL, 12_000_000)
    assert file is not None
    sealed = put_into_memory(file, partial(dump, STATE), lambda _: b"")
    assert sealed is not None
    assert sealed.path.read_bytes() == archive()
    assert (sealed.bytes, sealed.digest) == (len(archive()), digest_of(archive()))
    assert keeping.sealed() == [5]


def test_its_bytes_are_there_to_be_read_again_though_it_is_dropped(keeping: Keeping) -> None:
    file = keeping.shards.begin(5, MODEL, 12_000_000)
    assert file is not None
    sealed = put_into_memory(file, partial(dump, STATE), lambda _: b"")
    assert sealed is not None
    with closing(FileInMemory(sealed.path)) as memory:
        sealed.path.unlink()
        for _ in range(2):
            buffer = io.BytesIO()
            memory.produce(buffer)
            assert buffer.getvalue() == archive()
    with pytest.raises(FileNotFoundError):
        FileInMemory(sealed.path)


def test_a_state_beyond_the_budget_is_given_up_at_once_and_leaves_nothing(tmp_path: Path) -> None:
    keeping = Keeping(tmp_path, budget=4 << 20)
    file = keeping.shards.begin(5, MODEL, 1 << 20)
    assert file is not None
    made = []

    def produce(target: BinaryIO) -> None:
        while len(made) < 100:
            made.append(target.write(b"x" * (1 << 20)))

    assert put_into_memory(file, produce, lambda _: b"") is None
    assert len(made) < 10
    assert keeping.names() == []


def test_an_error_of_the_state_is_raised_as_it_is(keeping: Keeping) -> None:
    file = keeping.shards.begin(5, MODEL, 10)
    assert file is not None

    def produce(_: BinaryIO) -> None:
        raise RuntimeError("while pickling")

    with pytest.raises(RuntimeError, match="while pickling"):
        put_into_memory(file, produce, lambda _: b"")


def test_a_process_that_ends_puts_nothing_more_into_memory(
    keeping: Keeping, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = keeping.shards.begin(5, MODEL, 12_000_000)
    assert file is not None
    monkeypatch.setattr(ending.over, "is_set", lambda: True)
    with pytest.raises(SaveAbandonedError):
        put_into_memory(file, partial(dump, STATE), lambda _: b"")
    assert keeping.sealed() == []
