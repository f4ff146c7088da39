"""The checkpoint that an attempt resumes from, and steps that an older attempt committed."""

from pathlib import Path

import pytest
from trainsync import failpoints
from trainsync.api.protocol import SaveState
from trainsync.api.status import ConditionStatus
from trainsync.monitor import errors
from trainsync.monitor.client.disk import DiskMonitorClient
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves import manifest, pointers

from tests.unit.monitor.core.cores import Start, commit, healthy, pointer
from tests.unit.monitor.fleet import CrashError
from tests.unit.monitor.saves import (
    CHECKPOINT,
    FIRST,
    SECOND,
    STATE_DICT,
    Clock,
    directory,
    request,
    write_all,
)


def test_a_run_that_resumed_at_its_last_step_has_nothing_to_wait_for(
    start: Start, tmp_path: Path
) -> None:
    core = start()
    commit(core, tmp_path, 10)
    commit(core, tmp_path, 20)
    core = start(claim=SECOND)
    assert core.saves.save_status(SECOND, CHECKPOINT, 20).state is SaveState.UNKNOWN
    point = core.resume(SECOND)
    assert point is not None
    core = start(claim=None)  # the monitor restarts
    status = core.saves.save_status(SECOND, CHECKPOINT, 20)
    assert (status.state, status.manifest_digest) == (SaveState.COMMITTED, point.manifest_digest)
    assert core.saves.save_status(SECOND, CHECKPOINT, 10).state is SaveState.UNKNOWN
    assert core.saves.save_status(SECOND, STATE_DICT, 20).state is SaveState.UNKNOWN
    client = DiskMonitorClient(tmp_path, attempt=SECOND.attempt, incarnation=SECOND.incarnation)
    assert client.save_status(CHECKPOINT, 20) == status


def test_a_step_committed_by_an_older_attempt_is_not_saved_again(
    start: Start, tmp_path: Path, clock: Clock
) -> None:
    core = start()
    commit(core, tmp_path, 10)
    before = manifest.read_manifest(RunDirectory(tmp_path), CHECKPOINT, 10)
    core.claim(SECOND, "main", None)
    status = core.saves.register(SECOND, request(10))
    assert (status.state, status.manifest_digest) == (SaveState.COMMITTED, before.digest)
    write_all(tmp_path, SECOND, 10)
    clock.go(31)
    core.tick()
    assert manifest.read_manifest(RunDirectory(tmp_path), CHECKPOINT, 10) == before
    assert not directory(tmp_path, SECOND, 10).files.exists()


def test_a_damaged_step_of_an_older_attempt_is_replaced_by_a_new_save(
    start: Start, tmp_path: Path
) -> None:
    core = start()
    commit(core, tmp_path, 5)
    commit(core, tmp_path, 10)
    (tmp_path / "global_step_10/actor/checkpoint_rank_0.pt").unlink()
    core.claim(SECOND, "main", None)
    resumed = core.resume(SECOND)
    assert resumed is not None
    assert resumed.step == pointer(tmp_path) == 5
    assert healthy(core)[0] is ConditionStatus.FALSE
    commit(core, tmp_path, 10, SECOND)
    found = manifest.read_manifest(RunDirectory(tmp_path), CHECKPOINT, 10)
    assert found.manifest.attempt == 1
    manifest.check_manifest(RunDirectory(tmp_path), found.manifest, with_digest=True)
    assert pointer(tmp_path) == 10
    assert healthy(core)[0] is ConditionStatus.TRUE


def test_a_crash_amid_replacing_a_damaged_step_leaves_no_manifest_over_a_mixture(
    start: Start, tmp_path: Path
) -> None:
    core = start()
    commit(core, tmp_path, 5)
    commit(core, tmp_path, 10)
    (tmp_path / "global_step_10/actor/checkpoint_rank_0.pt").unlink()
    seen: list[str] = []

    def die_at_the_second_file(phase: str) -> None:
        seen.append(phase)
        if seen.count("promoting") == 2:
            raise CrashError

    failpoints.enable(failpoints.COMMIT, die_at_the_second_file)
    again = start(claim=SECOND)
    again.saves.register(SECOND, request(10))
    write_all(tmp_path, SECOND, 10)
    with pytest.raises(CrashError):
        again.tick()
    newest, _ = pointers.newest_valid(RunDirectory(tmp_path), CHECKPOINT)
    assert newest is not None
    assert newest.manifest.step == 5


def test_a_new_run_has_nothing_to_resume_from(start: Start) -> None:
    assert start().resume(FIRST) is None


def test_with_every_manifest_gone_resume_is_an_error_never_step_0(
    start: Start, tmp_path: Path
) -> None:
    core = start()
    commit(core, tmp_path, 10)
    RunDirectory(tmp_path).manifest(CHECKPOINT, 10).unlink()
    again = start(claim=SECOND)
    with pytest.raises(errors.NoValidCheckpointError, match="latest_checkpointed_iteration"):
        again.resume(SECOND)
    assert healthy(again)[0] is ConditionStatus.FALSE


def test_every_rank_of_an_attempt_resumes_from_the_same_step(start: Start, tmp_path: Path) -> None:
    core = start()
    commit(core, tmp_path, 10)
    points = [core.resume(FIRST) for _ in range(3)]
    assert points[0] is not None
    assert points == [points[0]] * 3
    assert points[0].path == "global_step_10"
