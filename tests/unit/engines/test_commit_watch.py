"""`CommitWatch`: what the registering rank learns of its saves, with a monitor that misbehaves."""

import threading
from typing import Any

import pytest
from trainsync.checkpoint.errors import SaveAbortedError, SaveTimeoutError
from trainsync.engines import commit_watch
from trainsync.engines.commit_watch import CommitWatch, Participants
from trainsync.monitor.errors import InvalidRequestError, MonitorUnavailableError

SAVE = Participants(3, state_dict=(("model", 0),), checkpoint=(("optim", 0),))


class Coordinator:
    """Raises ``refusals`` one after the other when registering, then waits as told."""

    def __init__(self, *refusals: Exception, outcome: Exception | None = None) -> None:
        self.refusals = list(refusals)
        self.outcome = outcome
        self.registered: list[int] = []
        self.awaited: list[bool] = []
        self.release = threading.Event()
        self.release.set()

    def register(self, step: int, **participants: Any) -> None:
        if self.refusals:
            raise self.refusals.pop(0)
        self.registered.append(step)

    async def register_and_monitor(
        self,
        step: int,
        is_state_dict: bool,
        timeout: float,  # noqa: ASYNC109 - as the coordinator has it
    ) -> None:
        self.awaited.append(is_state_dict)
        self.release.wait(30)
        if self.outcome is not None:
            raise self.outcome


def watch(coordinator: Coordinator) -> CommitWatch:
    return CommitWatch(coordinator, 30)  # type: ignore[arg-type]


def test_the_state_dict_is_awaited_before_the_checkpoint_that_reuses_it() -> None:
    coordinator = Coordinator()
    watching = watch(coordinator)
    watching.begin(SAVE)
    watching.wait(30)
    assert coordinator.registered == [3]
    assert coordinator.awaited == [True, False]


def test_a_monitor_that_is_away_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit_watch, "_RETRY_SECONDS", 0.0)
    coordinator = Coordinator(MonitorUnavailableError("away"), MonitorUnavailableError("away"))
    watching = watch(coordinator)
    watching.begin(SAVE)
    watching.wait(30)
    assert coordinator.registered == [3]


def test_a_refusal_is_raised_once() -> None:
    watching = watch(Coordinator(InvalidRequestError("other participants")))
    watching.begin(SAVE)
    with pytest.raises(InvalidRequestError, match="other participants"):
        watching.wait(30)
    watching.raise_failure()


def test_an_abort_is_raised_unless_it_was_to_be_expected() -> None:
    for tolerant in (False, True):
        watching = watch(Coordinator(outcome=SaveAbortedError("no space")))
        watching.begin(SAVE, tolerant=tolerant)
        if tolerant:
            watching.wait(30)
        else:
            with pytest.raises(SaveAbortedError, match="no space"):
                watching.wait(30)


def test_waiting_ends_at_its_deadline_and_goes_on_later() -> None:
    coordinator = Coordinator()
    coordinator.release.clear()
    watching = watch(coordinator)
    watching.begin(SAVE)
    with pytest.raises(SaveTimeoutError, match=r"step 3 was not committed within 0\.05 s"):
        watching.wait(0.05)
    coordinator.release.set()
    watching.wait(30)
