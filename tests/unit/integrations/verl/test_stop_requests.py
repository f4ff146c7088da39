"""verl's trainer saves when its run is to give up its pods, and then waits."""

from types import SimpleNamespace
from typing import Any

import pytest
from trainsync.integrations.verl import stop_requests


class Trainer:
    """As far as verl's loop goes here."""

    def __init__(self) -> None:
        self.global_steps = 0
        self.config = SimpleNamespace(trainer=SimpleNamespace(save_freq=100))
        self.saves: list[int] = []

    def on_step_end(self) -> None:
        """verl's own."""

    def _save_checkpoint(self) -> None:
        asked = stop_requests.state() == "wait"
        self.saves.append(self.global_steps)
        stop_requests.saved(self, asked)


@pytest.fixture
def words(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the monitor answers, one after the other, and then that nothing is known."""
    made: list[str] = []
    monkeypatch.setattr(stop_requests, "state", lambda: made.pop(0) if made else "unknown")
    monkeypatch.setattr(stop_requests, "_POLL_SECONDS", 0.0)
    return made


def step(trainer: Any) -> None:
    trainer.global_steps += 1
    stop_requests.after_each_step(trainer, trainer.on_step_end)()


def test_the_step_is_saved_that_is_asked_for_and_no_other(words: list[str]) -> None:
    trainer = Trainer()
    step(trainer)
    assert trainer.saves == []
    words[:] = ["wait", "wait", "wait", "away", "go", "unknown"]
    step(trainer)
    assert (trainer.saves, words) == ([2], []), "it goes on when the request is over"
    step(trainer)
    assert trainer.saves == [2]


def test_a_request_after_the_save_of_a_step_is_for_the_next_step(words: list[str]) -> None:
    trainer = Trainer()
    trainer.global_steps = 5
    trainer._save_checkpoint()
    trainer.global_steps = 4
    step(trainer)
    assert trainer.saves == [5]
    words[:] = ["wait", "wait", "unknown"]
    step(trainer)
    assert trainer.saves == [5, 6]


def test_a_trainer_that_saves_nothing_is_not_asked(words: list[str]) -> None:
    trainer = Trainer()
    trainer.config.trainer.save_freq = -1
    words[:] = ["wait"]
    step(trainer)
    assert (trainer.saves, words) == ([], ["wait"])


def test_a_trainer_waits_no_longer_than_the_longest_deadline(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop_requests, "_LONGEST_SECONDS", 0.0)
    words[:] = ["go"] * 9
    stop_requests.hold()
    assert len(words) == 8


def test_a_trainer_does_not_wait_for_a_monitor_that_stays_away(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop_requests, "_AWAY_SECONDS", 0.0)
    words[:] = ["go", "away", "go"]
    stop_requests.hold()
    assert words == ["go"]


def test_a_request_amid_a_save_is_answered_by_the_next_step(words: list[str]) -> None:
    trainer = Trainer()
    trainer.global_steps = 5
    words[:] = ["unknown", "wait"]
    trainer._save_checkpoint()
    assert words == ["wait"], "it did not hold the trainer"


def test_the_older_trainer_is_told_where_it_decides(words: list[str]) -> None:
    decides = stop_requests.or_asked(lambda **_: False)
    words[:] = ["unknown", "wait", "go"]
    assert [decides(redundant_time=1) for _ in range(3)] == [False, True, False]
    assert stop_requests.or_asked(lambda: True)()


def test_outside_a_pod_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRAINSYNC_MONITOR_URL", raising=False)
    assert stop_requests.state() == "unknown"
    monkeypatch.setenv("TRAINSYNC_MONITOR_URL", "http://127.0.0.1:9")
    assert stop_requests.state() == "away"
