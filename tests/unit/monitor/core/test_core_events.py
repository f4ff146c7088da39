"""A core's Events about findings on the volume."""

from pathlib import Path

import pytest
from trainsync.api.protocol import FailureReport, ParticipantRef
from trainsync.monitor import errors
from trainsync.monitor.core.core import CoreSettings, MonitorCore
from trainsync.monitor.server.events import EventQueue, EventReason
from trainsync.storage.layout import RunDirectory

from tests.unit.monitor.saves import CHECKPOINT, FIRST, SECOND, Clock, request, write_all

FILE = "actor/checkpoint_rank_0.pt"


class Told:
    """A run with checkpoints 10 and 20, whose monitor's Events are kept."""

    def __init__(self, root: Path) -> None:
        self.run, self.clock = RunDirectory(root), Clock()
        self.events = EventQueue(self.clock)
        self.core = self.start()
        self.core.claim(FIRST, "main", None)
        for step in (10, 20):
            self.core.saves.register(FIRST, request(step))
            write_all(root, FIRST, step)
            self.core.tick()

    def start(self) -> MonitorCore:
        self.core = MonitorCore(self.run, CoreSettings(), clock=self.clock, observer=self.events)
        return self.core

    def said(self) -> list[tuple[EventReason, str]]:
        return [(event.reason, event.message) for event in iter(self.events.take, None)]


@pytest.fixture
def told(tmp_path: Path) -> Told:
    return Told(tmp_path)


def test_commits_are_not_told_and_an_abort_is_with_its_cause(told: Told) -> None:
    assert told.said() == []
    who = ParticipantRef(component="model", rank=1)
    told.core.saves.register(FIRST, request(30))
    told.core.saves.failure(
        FIRST, FailureReport(kind=CHECKPOINT, step=30, participant=who, error="boom")
    )
    told.core.tick()
    told.start().tick()
    assert told.said() == [
        (EventReason.CHECKPOINT_ABORTED, "checkpoint 30 of attempt 0: model.1: boom")
    ]


def test_a_resume_from_an_older_one_is_told_with_what_is_wrong_with_the_newest(
    told: Told,
) -> None:
    (told.run.step(20) / FILE).unlink()
    told.core.claim(SECOND, "main", None)
    for _ in range(2):
        assert told.core.resume(SECOND) is not None
    (damaged, why), resumed = told.said()
    assert damaged is EventReason.CHECKPOINT_DAMAGED
    assert FILE in why
    assert "checkpoint 20 is damaged" in why
    assert resumed == (EventReason.RESUMED, "attempt 1 resumes from checkpoint 10")


def test_a_resume_without_a_valid_checkpoint_is_told_once(told: Told) -> None:
    for step in (10, 20):
        told.run.manifest(CHECKPOINT, step).unlink()
    told.core.claim(SECOND, "main", None)
    for _ in range(2):
        with pytest.raises(errors.NoValidCheckpointError):
            told.core.resume(SECOND)
    [(reason, message)] = told.said()
    assert reason is EventReason.RESUME_FAILED
    assert message.startswith("attempt 1 cannot resume: ")
    assert "no valid manifest is left" in message
