"""verl's trainer does not go on in silence with other data, or with none."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from trainsync.data.errors import DataMismatchError
from trainsync.integrations.verl import data_left


class Config(SimpleNamespace):
    """``trainer`` of verl's configuration."""

    def get(self, name: str, default: Any) -> Any:
        return getattr(self, name, default)


class Loader(SimpleNamespace):
    """A dataloader of two items a batch."""

    def __len__(self) -> int:
        return len(self.dataset) // 2


class Growing(list[int]):
    """A dataset to which verl adds after each step."""

    def on_batch_end(self, batch: object) -> None:
        self.append(len(self))


def trainer(directory: Path, items: int, step: int, wanted: int = 100, **config: Any) -> Any:
    named = {"default_local_dir": str(directory), "resume_mode": "auto", "total_epochs": 3}
    return SimpleNamespace(
        config=SimpleNamespace(trainer=Config(**{**named, **config})),
        train_dataloader=Loader(dataset=range(items)),
        global_steps=step,
        total_training_steps=wanted,
    )


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """The directory of a run that saved step 4 with 20 items."""
    folder = tmp_path / "global_step_4"
    folder.mkdir()
    (folder / "data.pt").touch()
    data_left.note(trainer(tmp_path, 20, 4), folder)
    return tmp_path


def by_path(directory: Path) -> dict[str, str]:
    return {"resume_mode": "resume_path", "resume_from_path": str(directory / "global_step_4")}


@pytest.mark.parametrize("items", [19, 21, 0])
def test_another_number_of_items_is_refused_with_both_numbers(saved: Path, items: int) -> None:
    for config in ({}, by_path(saved)):
        with pytest.raises(DataMismatchError, match=rf"trained on 20 items .* has {items}:"):
            data_left.check(trainer(saved, items, 4, **config))


def test_the_same_data_and_steps_without_a_number_are_taken(
    saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    data_left.check(trainer(saved, 20, 4, wanted=30))
    data_left.check(trainer(saved, 20, 4, wanted=30, **by_path(saved)))
    data_left.check(trainer(saved, 99, 3, wanted=30))  # another step, of an earlier release
    data_left.check(trainer(saved, 99, 0, wanted=30))
    assert not caplog.records


def test_a_number_that_cannot_be_read_is_told_and_the_monitor_says_what_is_damaged(
    saved: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (saved / "global_step_4" / data_left.FILE).write_text("{")
    data_left.check(trainer(saved, 7, 4, wanted=9))
    assert "not compared with that of step 4" in caplog.text


def test_a_dataset_that_grows_while_it_is_trained_on_is_not_compared(saved: Path) -> None:
    growing = trainer(saved, 7, 4, wanted=9)
    growing.train_dataloader.dataset = Growing(range(7))
    data_left.check(growing)


def test_nothing_is_noted_where_verl_saves_no_place_in_the_data(tmp_path: Path) -> None:
    data_left.note(trainer(tmp_path, 20, 4), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("step", "wanted", "said"),
    [
        (30, 30, "nothing is left to train: step 30 of 30"),
        (30, 40, "nothing is left to train: step 30 of 40"),
        (5, 40, "verl ends after step 30 of 40"),
        (0, 40, "verl ends after step 30 of 40"),
    ],
)
def test_what_ends_before_its_time_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, step: int, wanted: int, said: str
) -> None:
    """Three epochs of 20 items have 30 steps of two."""
    with caplog.at_level(logging.WARNING):
        data_left.check(trainer(tmp_path, 20, step, wanted))
    assert said in caplog.text
