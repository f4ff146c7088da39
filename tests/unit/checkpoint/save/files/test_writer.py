"""Files are complete or absent, their digests are right, and no file of others is replaced."""

import os
import resource
import signal
import stat
import zipfile
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.serialization import get_crc32_options
from trainsync.checkpoint.errors import CheckpointError
from trainsync.checkpoint.save.files import writer
from trainsync.checkpoint.save.files.dumping import dump
from trainsync.storage.digest import file_digest
from trainsync.storage.errors import UnsafePathError
from trainsync.storage.layout import SaveDirectory
from trainsync.storage.saves.receipts import Participant

MODEL = Participant("model", 0)


def own(save: SaveDirectory, participant: Participant = MODEL) -> writer.OwnFiles:
    return writer.OwnFiles(save, participant, save.files, "0123456789abcdef")


def everything(directory: Path) -> set[str]:
    return {str(p.relative_to(directory)) for p in directory.rglob("*") if not p.is_dir()}


def test_a_state_is_read_back_with_weights_only_and_its_entry_is_true(tmp_path: Path) -> None:
    state = {"w": torch.randn(1000, 100), "nested": [{"step": torch.tensor(3)}, "text"]}
    entry = writer.write(tmp_path / "files", "actor/model.pt", partial(dump, state))
    path = tmp_path / "files/actor/model.pt"
    assert (entry.path, entry.bytes) == ("actor/model.pt", path.stat().st_size)
    assert entry.digest == file_digest(path)
    loaded = torch.load(path, weights_only=True)
    assert torch.equal(loaded["w"], state["w"])
    assert loaded["nested"] == state["nested"]


def test_a_write_leaves_torchs_own_way_of_saving_as_it_was(tmp_path: Path) -> None:
    writer.write(tmp_path / "files", "model.pt", partial(dump, {"w": torch.zeros(3)}))
    assert get_crc32_options()
    torch.save({"w": torch.zeros(3)}, tmp_path / "own.pt")
    assert zipfile.ZipFile(tmp_path / "own.pt").testzip() is None


def test_modes_are_those_of_a_shared_volume_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        writer.write_bytes(tmp_path / "files", "a/b", b"x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "files/a/b").stat().st_mode) == 0o664
    assert stat.S_IMODE((tmp_path / "files/a").stat().st_mode) == 0o2775


@pytest.mark.parametrize("path", ["../x", "/x", "a/../../x", "a//b", ""])
def test_a_path_that_leaves_the_staging_directory_is_refused(tmp_path: Path, path: str) -> None:
    with pytest.raises(UnsafePathError):
        writer.write_bytes(tmp_path / "files", path, b"x")
    assert everything(tmp_path) == set()


class Explodes:
    def __reduce__(self) -> tuple[object, ...]:
        raise RuntimeError("while pickling")


def test_nothing_is_left_of_a_file_that_could_not_be_written(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="while pickling"):
        writer.write(tmp_path, "model.pt", partial(dump, {"w": torch.zeros(10), "x": Explodes()}))
    assert everything(tmp_path) == set()


def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))  # a limit on one file: EFBIG
    try:
        with pytest.raises(OSError, match="File too large"):
            writer.write(tmp_path, "model.pt", partial(dump, {"w": torch.zeros(1 << 20)}))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, ignored)
    assert everything(tmp_path) == set()


def test_what_a_function_wrote_is_adopted_with_true_entries(tmp_path: Path) -> None:
    save = SaveDirectory(tmp_path)

    def save_fn(directory: Path) -> None:
        (directory / "huggingface").mkdir()
        (directory / "huggingface/config.json").write_text("{}")
        (directory / "weights.bin").write_bytes(b"\1" * 100)

    entries = writer.write_own(own(save), "actor", save_fn)
    assert [e.path for e in entries] == ["actor/huggingface/config.json", "actor/weights.bin"]
    for entry in entries:
        assert entry.bytes == (save.files / entry.path).stat().st_size
        assert entry.digest == file_digest(save.files / entry.path)
    assert everything(tmp_path) == {f"files/{e.path}" for e in entries}


def test_a_function_that_wrote_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="wrote no file"):
        writer.write_own(own(SaveDirectory(tmp_path)), "actor", lambda directory: None)


def test_a_function_that_wrote_a_link_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="link, which is not a regular file"):
        writer.write_own(
            own(SaveDirectory(tmp_path)),
            "actor",
            lambda d: (d / "link").symlink_to("/etc/passwd"),
        )


def test_two_participants_cannot_write_the_same_file(tmp_path: Path) -> None:
    save = SaveDirectory(tmp_path)
    writer.write_own(own(save), "actor", lambda d: (d / "x").write_text("first"))
    with pytest.raises(CheckpointError, match="two participants wrote actor/x"):
        writer.write_own(
            own(save, Participant("model", 1)), "actor", lambda d: (d / "x").write_text("second")
        )
    assert (save.files / "actor/x").read_text() == "first"


def test_what_a_function_left_when_it_failed_is_removed(tmp_path: Path) -> None:
    def save_fn(directory: Path) -> None:
        (directory / "half").write_text("half")
        raise RuntimeError("torn")

    with pytest.raises(RuntimeError, match="torn"):
        writer.write_own(own(SaveDirectory(tmp_path)), "actor", save_fn)
    assert everything(tmp_path) == set()
