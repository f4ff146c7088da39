"""``spec.resumeFrom`` in a core: judged once, carried out once, whatever dies in between."""

import os
import signal
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
from trainsync.api.protocol import SaveKind
from trainsync.api.spec import ResumeFrom
from trainsync.api.status import ConditionStatus, ConditionType, RollbackState
from trainsync.failpoints import COMMIT, enabled
from trainsync.monitor import errors
from trainsync.monitor.core.core import CoreSettings, MonitorCore
from trainsync.monitor.ledger.saves import SaveOwner
from trainsync.storage import leases
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves import manifest, pointers
from trainsync.storage.saves.claims import LOCAL_UID

from tests.unit.monitor.resume.resuming import THIRD, Start, is_committed, pointer, resume, train
from tests.unit.monitor.resume.test_choice_state_dicts import state_dict_pointer, train_both
from tests.unit.monitor.saves import CHECKPOINT, FIRST, SECOND, request, write_all

REPOSITORY = Path(__file__).parents[4]
TO_10 = ResumeFrom(step=10)


def state(core: MonitorCore) -> RollbackState | None:
    found = core.view().checkpoint.rollback
    return found.state if found else None


def aside(root: Path) -> list[str]:
    return sorted(path.name for path in root.glob("rolled_back/*/global_step_*"))


def fresh_core(root: Path, run_uid: str = LOCAL_UID) -> MonitorCore:
    """A core before any claim."""
    settings = CoreSettings(run_uid=run_uid)
    return MonitorCore(RunDirectory(root), settings, clock=lambda: datetime.now(UTC))


def resumed(core: MonitorCore, owner: SaveOwner = SECOND) -> int | None:
    found = resume(core, owner)
    return found.step if found else None


def test_the_next_attempt_goes_on_from_the_older_step_and_later_ones_lie_aside_whole(
    start: Start, tmp_path: Path
) -> None:
    core = start(FIRST)
    train_both(core, tmp_path, FIRST, 10, 20, 30)
    core.resume_from(TO_10)
    assert state(core) is RollbackState.ACCEPTED
    assert pointer(tmp_path) == 30  # the attempt in force goes on
    core.claim(SECOND, "main", None)
    assert state(core) is RollbackState.DONE
    assert resumed(core) == 10
    assert (pointer(tmp_path), state_dict_pointer(tmp_path)) == (10, 10)
    assert aside(tmp_path) == ["global_step_20", "global_step_30"]
    place = RunDirectory(next((tmp_path / "rolled_back").iterdir()))
    for kind in SaveKind:
        kept = manifest.read_manifest(place, kind, 30).manifest
        manifest.check_manifest(place, kept, with_digest=True)
    condition = next(c for c in core.view().conditions if c.type is ConditionType.ROLLED_BACK)
    assert condition.status is ConditionStatus.TRUE
    assert "attempt 1 goes on from checkpoint 10; set aside in rolled_back/" in condition.message
    assert condition.message.endswith("steps 20, 30")


def test_the_same_step_is_trained_and_committed_again(start: Start, tmp_path: Path) -> None:
    core = start(FIRST)
    train(core, tmp_path, FIRST, 10, 20)
    core.resume_from(TO_10)
    core.claim(SECOND, "main", None)
    train(core, tmp_path, SECOND, 20)
    assert manifest.read_manifest(RunDirectory(tmp_path), CHECKPOINT, 20).manifest.attempt == 1
    assert aside(tmp_path) == ["global_step_20"]


def test_an_unchanged_request_does_nothing_at_the_next_attempt_and_in_the_next_monitor(
    start: Start, tmp_path: Path
) -> None:
    core = start(FIRST)
    train(core, tmp_path, FIRST, 10, 20)
    core.resume_from(TO_10)
    core.claim(SECOND, "main", None)
    train(core, tmp_path, SECOND, 20)
    again = start(SECOND)
    again.resume_from(TO_10)
    again.claim(THIRD, "main", None)
    assert state(again) is RollbackState.DONE
    assert resumed(again, THIRD) == 20


def test_another_request_for_the_same_step_goes_back_anew(start: Start, tmp_path: Path) -> None:
    core = start(FIRST)
    train(core, tmp_path, FIRST, 10, 20)
    core.resume_from(TO_10)
    core.claim(SECOND, "main", None)
    train(core, tmp_path, SECOND, 20)
    core.resume_from(ResumeFrom(step=10, request="again"))
    core.claim(THIRD, "main", None)
    assert resumed(core, THIRD) == 10
    assert aside(tmp_path) == ["global_step_20", "global_step_20"]


def test_a_step_that_is_not_committed_is_refused_for_good(start: Start, tmp_path: Path) -> None:
    core = start(FIRST)
    train(core, tmp_path, FIRST, 10)
    core.resume_from(ResumeFrom(step=20))
    condition = next(c for c in core.view().conditions if c.type is ConditionType.ROLLED_BACK)
    assert condition.status is ConditionStatus.FALSE
    assert condition.message == "spec.resumeFrom: checkpoint 20 is not committed; steps 10 are"
    train(core, tmp_path, FIRST, 20, 30)
    core.resume_from(ResumeFrom(step=20))
    core.claim(SECOND, "main", None)
    assert state(core) is RollbackState.REFUSED
    assert resumed(core) == 30


def test_a_step_whose_files_are_gone_is_refused(start: Start, tmp_path: Path) -> None:
    core = start(FIRST)
    train(core, tmp_path, FIRST, 10, 20)
    (tmp_path / "global_step_10/actor/checkpoint_rank_0.pt").unlink()
    core.resume_from(TO_10)
    found = core.view().checkpoint.rollback
    assert found is not None and found.state is RollbackState.REFUSED
    assert "checkpoint 10 is damaged" in found.message


def test_a_request_that_is_taken_back_in_time_changes_nothing(start: Start, tmp_path: Path) -> None:
    core = start(FIRST)
    train(core, tmp_path, FIRST, 10, 20)
    core.resume_from(TO_10)
    core.resume_from(None)
    core.claim(SECOND, "main", None)
    assert state(core) is None
    assert resumed(core) == 20


def test_retention_keeps_the_step_until_the_run_has_gone_back(start: Start, tmp_path: Path) -> None:
    core = start(FIRST, max_to_keep=1)
    train(core, tmp_path, FIRST, 10)
    core.resume_from(TO_10)
    train(core, tmp_path, FIRST, 20, 30)
    assert is_committed(tmp_path, 10)
    core.claim(SECOND, "main", None)
    assert resumed(core) == 10
    train(core, tmp_path, SECOND, 40, 50)
    assert not is_committed(tmp_path, 10)


def test_what_the_old_attempt_completed_last_is_set_aside_too(start: Start, tmp_path: Path) -> None:
    core = start(FIRST)
    train(core, tmp_path, FIRST, 10, 20)
    core.resume_from(TO_10)
    core.saves.register(FIRST, request(30))
    write_all(tmp_path, FIRST, 30)  # its writer lived on while the new attempt started
    core.claim(SECOND, "main", None)
    assert resumed(core) == 10
    write_all(tmp_path, FIRST, 40)
    core.tick()
    assert RunDirectory(tmp_path).steps() == [10]


def test_a_new_run_with_the_field_begins_at_that_step(start: Start, tmp_path: Path) -> None:
    train(start(FIRST), tmp_path, FIRST, 10, 20)
    core = fresh_core(tmp_path, run_uid="later")
    core.resume_from(TO_10)
    core.claim(FIRST, "main", None)
    assert resumed(core, FIRST) == 10


def test_a_reader_of_a_later_step_is_waited_for(start: Start, tmp_path: Path) -> None:
    core = start(FIRST)
    train(core, tmp_path, FIRST, 10, 20)
    core.resume_from(TO_10)
    with leases.reading(RunDirectory(tmp_path), CHECKPOINT, 20, "merge"):
        with pytest.raises(errors.NotReadyError, match="readers of steps 20 are done"):
            core.claim(SECOND, "main", None)
        assert core.ready
        assert pointer(tmp_path) == 20
    core.claim(SECOND, "main", None)
    assert resumed(core) == 10


def test_a_request_whose_record_is_damaged_is_refused_and_never_carried_out_twice(
    start: Start, tmp_path: Path
) -> None:
    core = start(FIRST)
    train(core, tmp_path, FIRST, 10, 20)
    core.resume_from(TO_10)
    core.claim(SECOND, "main", None)
    train(core, tmp_path, SECOND, 20)
    RunDirectory(tmp_path).rollback.write_text("{")
    again = start(SECOND)
    again.resume_from(TO_10)
    again.claim(THIRD, "main", None)
    assert state(again) is RollbackState.REFUSED
    assert resumed(again, THIRD) == 20


def test_status_that_names_a_step_set_aside_is_no_loss_of_the_volume(
    start: Start, tmp_path: Path
) -> None:
    core = start(FIRST)
    train(core, tmp_path, FIRST, 10, 20)
    core.resume_from(TO_10)
    core.claim(SECOND, "main", None)
    again = start(SECOND)
    again.expect(20)
    assert again.view().checkpoint.last_error is None


@pytest.mark.parametrize("count", [1, 2])
def test_a_monitor_killed_amid_a_rollback_is_followed_by_one_that_ends_it(
    start: Start, tmp_path: Path, count: int
) -> None:
    core = start(FIRST)
    train(core, tmp_path, FIRST, 10, 20, 30)
    core.resume_from(TO_10)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "tests.unit.monitor.resume.test_rollback",
            str(tmp_path),
            str(count),
        ],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert pointers.read_pointer(RunDirectory(tmp_path), CHECKPOINT) == 10
    again = start(SECOND)
    assert state(again) is RollbackState.DONE
    assert resumed(again) == 10
    assert aside(tmp_path) == ["global_step_20", "global_step_30"]


def _killed_at(root: Path, count: int) -> None:
    """Claim the attempt that goes back, in a process that is killed before the n-th move."""
    left = count

    def kill(point: str) -> None:
        nonlocal left
        left -= point == "rolling_back"
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    core = fresh_core(root)
    with enabled(COMMIT, kill):
        core.claim(SECOND, "main", None)


if __name__ == "__main__":
    _killed_at(Path(sys.argv[1]), int(sys.argv[2]))
