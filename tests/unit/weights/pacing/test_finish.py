"""The end of training looks after the trainers while explorers take the last version."""

from collections.abc import Callable
from typing import Any

import pytest
from trainsync.api.spec import SyncStyle
from trainsync.weights.pacing import loops
from trainsync.weights.pacing.loops import TrainerPace
from trainsync.weights.pacing.policy import SyncPolicy
from trainsync.weights.synchronizer.roster import STOPPED


class _Connection:
    """Answers in the place of the Synchronizer, in order."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.calls: list[str] = []

    def call(self, method: str, *arguments: Any, timeout: float) -> Any:
        if method == "finish_pace":
            answer = self.answers.pop(0)
            self.calls.append(method)
            if isinstance(answer, Exception):
                raise answer
            return answer
        self.calls.append(f"{method} {arguments[0]}")
        return None


Finishing = Callable[..., TrainerPace]


@pytest.fixture
def pace_with(monkeypatch: pytest.MonkeyPatch) -> Finishing:
    def make(connection: _Connection, timeout: float = 600.0) -> TrainerPace:
        monkeypatch.setattr(loops, "SynchronizerConnection", lambda *_: connection)
        policy = SyncPolicy(SyncStyle.TRAINER_DRIVEN, timeout=timeout)
        return TrainerPace(None, policy, lambda version: None, step=4)

    return make


_STOPS = f"set_trainer_status {STOPPED}"


def test_what_looks_after_trainers_is_called_until_all_have_the_version(
    pace_with: Finishing,
) -> None:
    connection = _Connection((False, ["a"]), (False, ["a"]), (True, []))
    looks: list[int] = []
    assert pace_with(connection).finish(meanwhile=lambda: looks.append(1)) == []
    assert len(looks) == 2
    assert connection.calls == ["finish_pace"] * 3 + [_STOPS]


def test_a_trainer_that_is_lost_ends_the_wait_and_explorers_go_on(pace_with: Finishing) -> None:
    connection = _Connection((False, ["a"]))

    def lost() -> None:
        raise RuntimeError("a rank is gone")

    with pytest.raises(RuntimeError, match="a rank is gone"):
        pace_with(connection).finish(meanwhile=lost)
    assert connection.calls == ["finish_pace"], "the trainers may be restarted in place"


def test_explorers_that_are_late_are_named_when_their_time_is_over(pace_with: Finishing) -> None:
    connection = _Connection((False, ["a"]))
    assert pace_with(connection, timeout=1e-6).finish() == ["a"]
    assert connection.calls == ["finish_pace", _STOPS]


def test_an_error_of_the_synchronizer_lets_explorers_end(pace_with: Finishing) -> None:
    connection = _Connection(ValueError("superseded"))
    with pytest.raises(ValueError, match="superseded"):
        pace_with(connection).finish()
    assert connection.calls == ["finish_pace", _STOPS]
