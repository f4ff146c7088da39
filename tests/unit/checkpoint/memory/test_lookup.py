"""A file is read from memory when it is what the manifest says, to the last bit; else not."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
from trainsync.checkpoint.errors import CorruptCheckpointError
from trainsync.checkpoint.load.account import LoadedBytes
from trainsync.checkpoint.load.resume import Resume
from trainsync.checkpoint.memory.lookup import Sources
from trainsync.storage.saves.receipts import Participant

from tests.unit.checkpoint.memory.keeping import MODEL, Keeping, manifest_of

PATH = "actor/model_world_size_1_rank_0.pt"
DATA = b"shard" * 1_000_000


@pytest.fixture
def keeping(tmp_path: Path) -> Keeping:
    return Keeping(tmp_path)


@pytest.fixture
def resume(keeping: Keeping) -> Resume:
    manifest = manifest_of({PATH: DATA}, MODEL)
    return Resume(5, keeping.run.step(5), manifest, memory=keeping.place)


def kept_file(keeping: Keeping) -> Path:
    (name,) = keeping.names()
    return keeping.place.path(name)


def test_a_whole_file_is_read_from_memory(keeping: Keeping, resume: Resume) -> None:
    keeping.keep(5, DATA)
    with Sources(resume) as sources:
        assert sources.in_memory(PATH)
        assert sources.path(PATH).read_bytes() == DATA
        assert sources.bytes([PATH]) == LoadedBytes(len(DATA), 0)


def test_another_process_finds_it_by_the_resume_that_it_is_sent(
    keeping: Keeping, resume: Resume
) -> None:
    keeping.keep(5, DATA)
    with Sources(pickle.loads(pickle.dumps(resume))) as sources:
        assert sources.in_memory(PATH)


def test_the_name_says_nothing_of_whose_file_it_is(keeping: Keeping, resume: Resume) -> None:
    keeping.keep(7, DATA, Participant("optim", 3))
    with Sources(resume) as sources:
        assert sources.path(PATH).read_bytes() == DATA


def test_what_is_found_stays_when_its_name_is_dropped(keeping: Keeping, resume: Resume) -> None:
    keeping.keep(5, DATA)
    with Sources(resume) as sources:
        assert sources.in_memory(PATH)
        path = kept_file(keeping)
        path.unlink()
        path.write_bytes(b"other bytes")
        assert sources.path(PATH).read_bytes() == DATA


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def link(path: Path) -> None:
    elsewhere = path.parent / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def open_place(path: Path) -> None:
    path.parent.chmod(0o777)


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (flip, "has digest"),
        (cut, "has 4999999 bytes, expected 5000000"),
        (lengthen, "has 5000001 bytes"),
        (link, "symbolic link"),
        (directory, "is not a file of this user"),
        (pipe, "is not a file of this user"),
        (open_place, "no rights for others"),
    ],
)
def test_anything_else_is_read_from_the_volume_and_logged(
    keeping: Keeping,
    resume: Resume,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[Path], None],
    why: str,
) -> None:
    keeping.keep(5, DATA)
    damage(kept_file(keeping))
    with Sources(resume) as sources:
        assert sources.path(PATH) == resume.path / PATH
        assert sources.bytes([PATH]) == LoadedBytes(0, len(DATA))
    assert f"{PATH} is not read from memory" in caplog.text
    assert why in caplog.text


def test_what_a_glance_opened_is_what_is_read_once_its_bytes_were_compared(
    keeping: Keeping, resume: Resume
) -> None:
    keeping.keep(5, DATA)
    with Sources(resume) as sources:
        glanced = sources.glance(PATH)
        assert glanced.read_bytes() == DATA
        assert sources.only_glanced([PATH])
        assert sources.path(PATH) == sources.glance(PATH) == glanced
        assert not sources.only_glanced([PATH])


@pytest.mark.parametrize(("damage", "glanced"), [(flip, True), (cut, False)])
def test_a_glance_believes_a_name_and_a_size_and_a_comparison_does_not(
    keeping: Keeping, resume: Resume, damage: Callable[[Path], None], glanced: bool
) -> None:
    keeping.keep(5, DATA)
    damage(kept_file(keeping))
    with Sources(resume) as sources:
        assert (sources.glance(PATH) != resume.path / PATH) is glanced
        assert sources.path(PATH) == sources.glance(PATH) == resume.path / PATH


def test_another_users_file_is_not_read(
    keeping: Keeping, resume: Resume, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeping.keep(5, DATA)
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    with Sources(resume) as sources:
        assert not sources.in_memory(PATH)


def test_a_damaged_file_does_not_hide_a_whole_one(keeping: Keeping, resume: Resume) -> None:
    keeping.keep(5, DATA, Participant("model", 0))
    flip(kept_file(keeping))
    keeping.keep(5, DATA, Participant("model", 1))
    with Sources(resume) as sources:
        assert sources.in_memory(PATH)


def test_a_file_that_was_not_finished_is_not_found(keeping: Keeping, resume: Resume) -> None:
    file = keeping.shards.begin(5, MODEL, len(DATA))
    assert file is not None
    file.write(memoryview(DATA))
    with Sources(resume) as sources:
        assert not sources.in_memory(PATH)


def test_bytes_of_another_step_are_not_found(keeping: Keeping, resume: Resume) -> None:
    keeping.keep(5, DATA[:-1] + b"x")
    with Sources(resume) as sources:
        assert not sources.in_memory(PATH)


def test_what_the_manifest_does_not_list_is_an_error(keeping: Keeping, resume: Resume) -> None:
    keeping.keep(5, DATA)
    with (
        Sources(resume) as sources,
        pytest.raises(CorruptCheckpointError, match=r"has no other\.pt"),
    ):
        sources.path("other.pt")


def test_without_memory_everything_is_on_the_volume(resume: Resume) -> None:
    plain = Resume(resume.step, resume.path, resume.manifest)
    with Sources(plain) as sources:
        assert sources.path(PATH) == resume.path / PATH
