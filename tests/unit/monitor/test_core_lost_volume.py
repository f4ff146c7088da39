"""A volume that is empty although the run's status knows of a checkpoint: never step 0 unasked."""

from pathlib import Path

import pytest
from trainsync.api.status import ConditionStatus, ConditionType
from trainsync.monitor.core import CoreSettings, MonitorCore
from trainsync.monitor.errors import NotReadyError, NoValidCheckpointError
from trainsync.storage.layout import RunDirectory

from tests.unit.monitor.saves import FIRST, SECOND, Clock, request, write_all


def core_of(root: Path) -> MonitorCore:
    core = MonitorCore(RunDirectory(root), CoreSettings(has_status=True), clock=Clock())
    core.tick()
    return core


def health(core: MonitorCore) -> tuple[ConditionStatus, str]:
    found = [c for c in core.view().conditions if c.type is ConditionType.CHECKPOINT_HEALTHY]
    return found[0].status, found[0].message


def test_nobody_resumes_before_the_status_is_read(tmp_path: Path) -> None:
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
    status, message = health(core)
    assert status is ConditionStatus.FALSE and "another volume is mounted" in message
    core.register(SECOND, request(1))
    write_all(tmp_path, SECOND, 1)
    core.tick()
    assert health(core)[0] is ConditionStatus.TRUE


def test_a_volume_that_has_a_checkpoint_is_resumed_from_whatever_the_status_says(
    tmp_path: Path,
) -> None:
    core = core_of(tmp_path)
    core.expect(40)
    core.claim(FIRST, "main", None)
    core.register(FIRST, request(20))
    write_all(tmp_path, FIRST, 20)
    core.tick()
    point = core.resume(FIRST)
    assert point is not None and point.step == 20
