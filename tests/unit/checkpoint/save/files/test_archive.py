"""`StateArchives`: what is kept from one archive is in the next just where torch would write it."""

import io
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trainsync.checkpoint.load.reshard.plan import Layout, Split
from trainsync.checkpoint.save.files import archive, writer
from trainsync.checkpoint.save.files.archive import StateArchives
from trainsync.checkpoint.save.files.state_pickle import StatePickles

from tests.unit.checkpoint.save.files.test_state_pickle import changed, exact, staged
from tests.unit.checkpoint.sharded import dtensor
from tests.unit.checkpoint.states import states


class Saver:
    """Saves states of a component one after another, and counts the writers of their archives."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "model.pt"
        self.archives = StateArchives()
        self.pickles = StatePickles()
        self.by_torch = 0

    def save(self, state: Any) -> bytes:
        """The file; torch's is the same."""
        counted = io.BytesIO()
        real = torch.save

        def save(*arguments: Any, **more: Any) -> None:
            self.by_torch += 1
            real(*arguments, **more)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "save", save)
            copied = staged(state)
            may_learn = self.archives.write(copied, counted)
        self.path.write_bytes(counted.getvalue())
        if may_learn:
            self.archives.learn(self.path, copied)
        expected = io.BytesIO()
        archive.write(staged(state), expected, self.pickles)
        assert counted.getvalue() == expected.getvalue()
        return counted.getvalue()


def read(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)


@settings(max_examples=100, deadline=None)
@given(first=states, other=states, data=st.data())
def test_states_in_turn_are_written_as_torch_writes_them(
    tmp_path_factory: pytest.TempPathFactory, first: Any, other: Any, data: st.DataObject
) -> None:
    saver = Saver(tmp_path_factory.mktemp("archive"))
    for state in (first, first, first, changed(first, data), first, first, first, other, first):
        assert exact(read(saver.save(state)), {}, {}) == exact(staged(state).state, {}, {})


def test_from_the_third_save_on_torch_is_not_asked(tmp_path: Path) -> None:
    saver = Saver(tmp_path)
    tied = torch.zeros(3)
    for step in range(6):
        tied.fill_(step)
        state = {
            "a": tied,
            "b": {"c": tied, "empty": torch.empty(0), "half": torch.full((2, 5), step).half()},
            "lr": 0.1 / (step + 1),
        }
        loaded = read(saver.save(state))
        assert (loaded["a"].tolist(), loaded["lr"]) == ([step] * 3, 0.1 / (step + 1))
        assert loaded["a"].data_ptr() == loaded["b"]["c"].data_ptr()
    assert saver.by_torch == 2


def test_shards_share_all_but_their_bytes(tmp_path: Path) -> None:
    saver = Saver(tmp_path)
    layout = Layout((4, 4), (2,), (0, 1), (Split(0, 1),))
    for i in range(4):
        local = torch.arange(8.0).reshape(2, 4) * i
        loaded = read(saver.save({"w": dtensor(local, layout, 0)}))
        assert torch.equal(loaded["w"]._local_tensor, local)
    assert saver.by_torch == 2


def test_a_pickle_of_another_size_is_left_to_torch(tmp_path: Path) -> None:
    saver = Saver(tmp_path)
    for step in (1, 2, 3, 255, 256, 257, 258):  # from 256 on a number takes a byte more
        assert read(saver.save({"w": torch.ones(2), "step": step}))["step"] == step
    assert saver.by_torch == 2 + 2


def test_what_changes_its_size_at_every_save_is_never_read_again() -> None:
    archives = StateArchives()
    for step in range(1, 8):
        assert not archives.write(staged({"w": torch.ones(2), "text": "x" * step}), io.BytesIO())


def test_an_archive_with_check_sums_is_left_to_torch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a torch writes it whose settings are not each thread's own: then it keeps its default."""
    monkeypatch.delattr("torch.utils._config_module.ContextVar")
    saver = Saver(tmp_path)
    for step in range(5):
        data = saver.save({"w": torch.full((3,), step)})
        assert all(record.CRC for record in zipfile.ZipFile(io.BytesIO(data)).infolist())
    assert saver.by_torch == 5


@pytest.mark.parametrize("damage", ["gone", "torn", "fewer", "other sizes", "other names"])
def test_a_file_that_is_gone_or_damaged_costs_nothing_but_time(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    archives = StateArchives()
    state = {"w": torch.ones(3), "b": torch.zeros(2)}
    path = tmp_path / "model.pt"
    for _ in range(2):
        file = io.BytesIO()
        copied = staged(state)
        may_learn = archives.write(copied, file)
    assert may_learn
    if damage == "torn":
        path.write_bytes(file.getvalue()[:-30])
    elif damage == "other names":
        path.write_bytes(file.getvalue().replace(b"/data/0", b"/data/x"))
    elif damage != "gone":
        other = {"w": torch.ones(4), "b": torch.ones(4)} if damage == "other sizes" else {}
        archive.write(other, with_file := io.BytesIO())
        path.write_bytes(with_file.getvalue())
    archives.learn(path, copied)
    assert f"{path} cannot be read, further saves are slower" in caplog.text
    for _ in range(3):
        file = io.BytesIO()
        assert not archives.write(staged(state), file)
        assert read(file.getvalue())["w"].tolist() == [1, 1, 1]


def test_the_writer_learns_from_its_own_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archives = StateArchives()
    for step in range(4):
        if step == 2:
            monkeypatch.delattr(torch, "save")
        state = staged({"w": torch.full((3,), step)})
        entry = writer.write_state(tmp_path / f"files{step}", "model.pt", state, archives=archives)
        data = (tmp_path / f"files{step}/model.pt").read_bytes()
        assert (len(data), read(data)["w"].tolist()) == (entry.bytes, [step] * 3)
