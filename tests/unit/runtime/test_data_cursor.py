"""A data cursor is a part of the commit, and a run goes on from the cursor of the step that it
resumes from."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from trainsync.checkpoint.data_cursor import data_cursor_file
from trainsync.checkpoint.errors import CorruptCheckpointError
from trainsync.checkpoint.shard_names import DATA_CURSOR_FILE
from trainsync.data.errors import DataMismatchError
from trainsync.runtime.context import RunContext
from trainsync.storage.layout import RunDirectory

MODEL = torch.nn.Linear(1, 1)


def save(directory: Path, cursor: Any, step: int = 1, **options: Any) -> None:
    with RunContext.from_env(directory, environ={}) as context:
        coordinator = context.coordinator()
        coordinator.save(step, model=MODEL, data_cursor=cursor, **options)
        coordinator.finish(timeout=30)


@pytest.mark.parametrize("subdir", ["actor", ""])
def test_the_next_attempt_goes_on_with_what_was_not_trained(tmp_path: Path, subdir: str) -> None:
    with RunContext.from_env(tmp_path, environ={}) as context:
        cursor = context.data_cursor(9, shuffle=False)
        coordinator = context.coordinator()
        flying, done, late = cursor.take(2), cursor.take(3), cursor.take(2)
        cursor.trained(done)
        coordinator.save(1, model=MODEL, data_cursor=cursor, subdir=subdir)
        cursor.trained(late)  # after the save: undone by a death
        coordinator.finish(timeout=30)
    with RunContext.from_env(tmp_path, environ={}) as context:
        cursor = context.data_cursor(9, shuffle=False, subdir=subdir)
        assert [item.index for item in cursor.take(9)] == [
            *(item.index for item in (*flying, *late)),
            7,
            8,
        ]


def test_a_state_of_another_process_is_saved_as_it_is(tmp_path: Path) -> None:
    save(tmp_path, {"my sampler": [1, 2]})
    with RunContext.from_env(tmp_path, environ={}) as context:
        resume = context.resume()
        assert resume is not None
        assert resume.data_cursor() == {"my sampler": [1, 2]}
        assert resume.data_cursor("critic") is None


def test_a_changed_dataset_or_a_checkpoint_without_a_cursor_is_told(tmp_path: Path) -> None:
    with RunContext.from_env(tmp_path / "one", environ={}) as context:
        save_cursor = context.data_cursor(9)
    save(tmp_path / "one", save_cursor)
    save(tmp_path / "other", None)
    with (
        RunContext.from_env(tmp_path / "one", environ={}) as context,
        pytest.raises(DataMismatchError, match="length 9, this one 10"),
    ):
        context.data_cursor(10)
    with (
        RunContext.from_env(tmp_path / "other", environ={}) as context,
        pytest.raises(DataMismatchError, match="step 1 has no data cursor"),
    ):
        context.data_cursor(9)


@pytest.mark.parametrize(
    ("cursor", "said"),
    [(3, "is a int"), ({"a": {1}}, "JSON"), ({"a": float("nan")}, "JSON"), ({"a": b""}, "JSON")],
)
def test_what_json_cannot_hold_is_refused_before_anything_is_saved(
    tmp_path: Path, cursor: Any, said: str
) -> None:
    with RunContext.from_env(tmp_path, environ={}) as context:
        coordinator = context.coordinator()
        with pytest.raises(TypeError, match=said):
            coordinator.save(1, model=MODEL, data_cursor=cursor)
        assert coordinator.finish(timeout=5) is None, "nothing was saved"


def test_a_cursor_beside_batches_that_are_kept_over_restarts_is_refused(tmp_path: Path) -> None:
    with RunContext.from_env(tmp_path, environ={}) as context:
        context.data_cursor(9)
        with pytest.raises(ValueError, match="would deal the items of the kept batches again"):
            context.pace_trainer(lambda version: None, step=0, keep_batches=True)
        with pytest.raises(ValueError, match=r"use ctx\.batch_cursor"):
            context.data_cursor(9)


def test_a_damaged_cursor_is_refused_and_reported(tmp_path: Path) -> None:
    save(tmp_path, {"place": 12})
    path = RunDirectory(tmp_path).step(1) / "actor" / DATA_CURSOR_FILE
    with RunContext.from_env(tmp_path, environ={}) as context:
        resume = context.resume()
        assert resume is not None
        path.write_bytes(path.read_bytes().replace(b"12", b"13"))
        with pytest.raises(CorruptCheckpointError, match="the run's monitor was told"):
            resume.data_cursor()


def test_the_file_is_an_attachment_of_parts_that_are_saved_one_by_one() -> None:
    files = data_cursor_file({"place": 3})
    assert {path: json.loads(content) for path, content in files.items()} == {
        DATA_CURSOR_FILE: {"place": 3}
    }
