"""The harness notices each promise to a preempted run that is broken."""

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from trainsync.api.status import StopReason, StopRequest, StopSave, StopSaveState
from trainsync.checkpoint.load.resume import open_resume

from tests.faults.kube import FileApi
from tests.faults.plan import Plan, Shape, Step, draw
from tests.faults.processes import BrokenError
from tests.faults.promises import check_answer, check_freed, check_kept
from tests.faults.scenarios.preempted_job import Counter, step_of
from tests.faults.training import Trainer, check_shards, host
from tests.faults.trial import Trial

NOW = datetime(2026, 1, 1, tzinfo=UTC)


def plan() -> Plan:
    return draw(1, split=False, shape=Shape.CHECKPOINT)


@pytest.fixture
def trial(tmp_path: Path) -> Trial:
    """Step 7 is committed."""
    trial = Trial(1, tmp_path, "nowhere")
    trial.run.root.mkdir()
    where = trial.attempt(plan())
    client = host(where, plan())
    Trainer(where, plan(), client, range(plan().ranks)).train([Step(7, Shape.CHECKPOINT)])
    client.close()
    return trial


def answer(step: int, state: StopSaveState) -> StopSave:
    return StopSave(since=NOW, step=step, state=state)


def test_an_answer_that_is_not_true_is_noticed(trial: Trial) -> None:
    check_answer(trial.run, answer(7, StopSaveState.COMMITTED))
    check_answer(trial.run, answer(8, StopSaveState.SAVING))
    check_answer(trial.run, answer(8, StopSaveState.FAILED))
    with pytest.raises(BrokenError, match="8 is committed; it is not"):
        check_answer(trial.run, answer(8, StopSaveState.COMMITTED))
    with pytest.raises(BrokenError, match="7 failed; it is committed"):
        check_answer(trial.run, answer(7, StopSaveState.FAILED))


@pytest.mark.parametrize(
    ("told", "trained", "resumed", "committed", "said"),
    [
        (7, 8, 7, 7, "step 8 was trained: lost"),
        (8, 8, 7, 7, "resumes at 7, 8 was trained: lost"),
        (None, 8, 3, 7, "resumes at 3, committed is 7"),
        (None, 8, 9, 9, "only 8 was trained"),
    ],
)
def test_a_step_that_is_lost_is_noticed(
    told: int | None, trained: int, resumed: int, committed: int, said: str
) -> None:
    with pytest.raises(BrokenError, match=said):
        check_kept(told, trained, resumed, committed)


def test_what_is_promised_is_not_taken_for_a_loss() -> None:
    check_kept(8, 8, 8, 8)
    check_kept(None, 8, 7, 7)
    check_kept(None, 8, 0, 0)


def test_a_pod_that_is_held_beyond_its_notice_is_noticed() -> None:
    check_freed(1.4, 1.0, 0.5)
    with pytest.raises(BrokenError, match=r"held for 1\.6 s"):
        check_freed(1.6, 1.0, 0.5)


def test_bytes_of_another_step_are_noticed(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    client = host(trial.attempt(plan()), plan())
    resume = client.resume()
    client.close()
    assert resume is not None
    opened = open_resume(trial.run.root, resume)
    check_shards(plan(), opened)
    real = Plan.state

    def late(self: Plan, attempt: int, step: int, component: str, rank: int) -> dict[str, object]:
        return real(self, attempt, step + 1, component, rank)

    monkeypatch.setattr(Plan, "state", late)
    with pytest.raises(BrokenError, match="of step 7 is not what was saved"):
        check_shards(plan(), opened)


def test_the_request_stands_beside_the_monitors_part_of_the_status(tmp_path: Path) -> None:
    api = FileApi.create(tmp_path / "api")
    request = StopRequest(since=NOW, deadline=NOW + timedelta(1), reason=StopReason.SUSPEND)
    api.ask_to_stop(request)
    saved = answer(7, StopSaveState.COMMITTED)
    applied = asyncio.run(api.apply_status("", {"checkpoint": {"stopSave": saved.to_json_dict()}}))
    assert applied["status"]["stopping"] == request.to_json_dict()
    assert api.stop_save() == saved
    api.ask_to_stop(None)
    assert "stopping" not in asyncio.run(api.get_run())["status"]
    assert api.stop_save() == saved


def test_a_step_is_of_one_shape_in_every_attempt_and_the_counter_is_shared() -> None:
    shapes = {step_of(draw(3, shape=Shape.REUSE), number).shape for number in range(20)}
    assert shapes == {Shape.CHECKPOINT, Shape.REUSE}
    counter = Counter()
    counter.step += 3
    assert counter.step == 3
