"""A volume that is empty although the run's status knows of a checkpoint: never step 0 unasked."""

from pathlib import Path

import pytest
from trainsync.api.protocol import FailureReport, ParticipantRef, SaveKind
from trainsync.api.status import ConditionStatus, ConditionType
from trainsync.monitor.commit.observer import NullObserver
from trainsync.monitor.core.core import CoreSettings, MonitorCore
from trainsync.monitor.errors import NotReadyError, NoValidCheckpointError
from trainsync.monitor.ledger.saves import SaveOwner
from trainsync.storage.layout import RunDirectory
from trainsync.storage.leases import LeaseBook

from tests.unit.monitor.core.cores import healthy
from tests.unit.monitor.saves import FIRST, SECOND, Clock, request, write_all


class Told(NullObserver):
    """The messages about damaged saves."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def damaged(self, kind: SaveKind, message: str) -> None:
        del kind
        self.texts.append(message)


def core_of(root: Path, told: Told | None = None) -> MonitorCore:
    core = MonitorCore(
        RunDirectory(root), CoreSettings(has_status=True), clock=Clock(), observer=told
    )
    core.tick()
    return core


def test_no_attempt_resumes_before_the_status_is_read(tmp_path: Path) -> None:
    core = core_of(tmp_path)
    core.claim(FIRST, "main", None)
    with pytest.raises(NotReadyError, match="status is not read yet"):
        core.resume(FIRST)
    core.expect(None)
    assert core.resume(FIRST) is None


def test_an_emptied_volume_is_refused_and_shown_until_something_is_committed(
    tmp_path: Path,
) -> None:
    core = core_of(tmp_path)
    core.expect(40)
    core.claim(SECOND, "main", None)
    with pytest.raises(NoValidCheckpointError, match="checkpoint 40 was committed, and nothing is"):
        core.resume(SECOND)
    status, message = healthy(core)
    assert status is ConditionStatus.FALSE and "another volume is mounted" in message
    core.saves.register(SECOND, request(1))
    write_all(tmp_path, SECOND, 1)
    core.tick()
    assert healthy(core)[0] is ConditionStatus.TRUE


def test_a_volume_that_has_a_checkpoint_is_resumed_from_whatever_the_status_says(
    tmp_path: Path,
) -> None:
    core = core_of(tmp_path)
    core.expect(40)
    core.claim(FIRST, "main", None)
    core.saves.register(FIRST, request(20))
    write_all(tmp_path, FIRST, 20)
    core.tick()
    point = core.resume(FIRST)
    assert point is not None and point.step == 20


def save(core: MonitorCore, root: Path, owner: SaveOwner, *steps: int) -> None:
    for step in steps:
        core.saves.register(owner, request(step))
        write_all(root, owner, step)
        core.tick()


def reason(core: MonitorCore) -> str:
    return next(
        c.reason for c in core.view().conditions if c.type is ConditionType.CHECKPOINT_HEALTHY
    )


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A volume on which checkpoints 20 and 40 are committed."""
    core = core_of(tmp_path)
    core.claim(FIRST, "main", None)
    save(core, tmp_path, FIRST, 20, 40)
    return tmp_path


@pytest.mark.parametrize("ready_first", [True, False], ids=["ready first", "status first"])
def test_an_older_volume_is_told_of_until_something_newer_is_committed(
    trained: Path, ready_first: bool
) -> None:
    told = Told()
    core = MonitorCore(
        RunDirectory(trained), CoreSettings(has_status=True), clock=Clock(), observer=told
    )
    if ready_first:
        core.tick()
    core.expect(100)
    core.claim(SECOND, "main", None)
    point = core.resume(SECOND)
    assert point is not None and point.step == 40
    status, message = healthy(core)
    assert status is ConditionStatus.FALSE and reason(core) == "CheckpointMissing"
    assert "says that checkpoint 100 was committed, and the newest in" in message
    assert "resume from step 40" in message and told.texts == [message]
    save(core, trained, SECOND, 60)
    assert healthy(core)[0] is ConditionStatus.TRUE
    assert len(told.texts) == 1


def test_what_was_set_aside_or_does_not_stand_is_not_missing(trained: Path) -> None:
    run = RunDirectory(trained)
    run.manifest(SaveKind.CHECKPOINT, 40).rename(run.set_aside(SaveKind.CHECKPOINT, 40))
    told = Told()
    core = core_of(trained, told)
    core.expect(40)
    assert "was committed, and the newest" not in " ".join([healthy(core)[1], *told.texts])
    assert reason(core) == "CheckpointDamaged"


@pytest.mark.parametrize("expected", [None, 20, 40])
def test_a_volume_that_has_what_the_status_says_or_more_is_healthy(
    trained: Path, expected: int | None
) -> None:
    core = core_of(trained)
    core.expect(expected)
    assert healthy(core)[0] is ConditionStatus.TRUE


def test_the_condition_says_which_kind_of_trouble_it_is(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunDirectory(trained)
    run.pointer(SaveKind.CHECKPOINT).write_text("70\n")
    assert reason(core_of(trained)) == "PointerWrong"
    core = core_of(trained)
    core.claim(SECOND, "main", None)
    core.saves.register(SECOND, request(50))
    report = FailureReport(
        kind=SaveKind.CHECKPOINT,
        step=50,
        participant=ParticipantRef(component="model", rank=0),
        error="disk full",
    )
    core.saves.failure(SECOND, report)
    core.tick()
    assert reason(core) == "SaveFailed"

    def refuse(*_: object) -> list[int]:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(LeaseBook, "in_force", refuse)
    core = core_of(trained)
    assert reason(core) == "VolumeFailing"
