"""What is at risk, and where the save stands that was asked for."""

from datetime import UTC, datetime, timedelta

import pytest
from trainsync.api.protocol import SaveKind
from trainsync.api.spec import Role
from trainsync.api.status import AtRisk, Progress, RolePods, StopSaveState
from trainsync.monitor.kube.run_reader import gpus_of, parse_run
from trainsync.monitor.ledger.ledger import Ledger
from trainsync.monitor.ledger.saves import AbortReason, CommittedInfo, SaveKey, SaveOwner
from trainsync.monitor.ledger.stop_save import StopAnswer, at_risk, stop_save

NOW = datetime(2026, 1, 1, tzinfo=UTC)
OWNER, OLDER = SaveOwner(1, "bbbbbbbb"), SaveOwner(0, "aaaaaaaa")


def later(seconds: float) -> datetime:
    return NOW + timedelta(seconds=seconds)


def ledger(*committed: tuple[int, float, SaveOwner]) -> Ledger:
    made = Ledger(timedelta(minutes=1))
    made.grant("main", OLDER)
    made.grant("main", OWNER)
    for step, at, owner in committed:
        info = CommittedInfo(step, owner, "sha256:0", 5, later(at))
        made.committed(SaveKind.CHECKPOINT, info)
    return made


def progress(step: int, at: float) -> Progress:
    return Progress(step=step, last_report_time=later(at))


@pytest.mark.parametrize(
    ("committed", "reported", "expected"),
    [
        ([], progress(7, 60), AtRisk(steps=7, seconds=50, gpu_seconds=800)),
        ([(5, 40, OWNER)], progress(7, 60), AtRisk(steps=2, seconds=20, gpu_seconds=320)),
        ([(7, 70, OWNER)], progress(7, 60), AtRisk(steps=0, seconds=0, gpu_seconds=0)),
        # Resumed: the time before this attempt's first report trained nothing that can be lost.
        ([(5, -900, OLDER)], progress(7, 60), AtRisk(steps=2, seconds=50, gpu_seconds=800)),
    ],
)
def test_what_a_loss_would_cost_is_the_work_since_the_last_commit(
    committed: list[tuple[int, float, SaveOwner]], reported: Progress, expected: AtRisk
) -> None:
    assert at_risk(reported, later(10), ledger(*committed), 16.0) == expected


def test_before_the_first_report_nothing_is_known_to_be_at_risk() -> None:
    assert at_risk(None, None, ledger(), 16.0) is None


def test_the_gpus_of_all_pods_count() -> None:
    def template(**limits: object) -> dict[str, object]:
        return {"spec": {"containers": [{"resources": {"limits": limits}}, {}]}}

    trainer = {"replicas": 2, "template": template(**{"nvidia.com/gpu": 8, "memory": "1Gi"})}
    explorer = {"template": template(**{"amd.com/gpu": "1"})}
    head = {"template": template(**{"nvidia.com/gpu": "1"})}
    clusters = [{"head": head, "groups": [trainer, explorer]}, {"groups": [{"replicas": 3}]}]
    assert gpus_of({"clusters": clusters}) == 18
    assert gpus_of({}) == 0


def test_pods_of_an_older_operator_or_a_newer_one_are_unknown() -> None:
    def pods(status: dict[str, object]) -> object:
        return parse_run({"metadata": {"uid": "u"}, "status": status}, "u").pods

    assert pods({}) is None
    assert pods({"pods": [{"role": "Judge"}]}) is None
    assert pods({"pods": [{"role": "Trainer", "held": 2, "colour": "red"}]}) == {
        Role.TRAINER: RolePods(role="Trainer", held=2)
    }


def test_a_request_of_a_newer_operator_is_ignored() -> None:
    run = {"metadata": {"uid": "u"}, "status": {"stopping": {"since": "tomorrow"}}}
    assert parse_run(run, "u").stopping is None


def test_the_save_stands_where_its_step_does() -> None:
    answer = StopAnswer(NOW, OWNER, 7)
    saving = ledger((5, 0, OWNER))
    assert stop_save(None, saving) is None
    assert stop_save(StopAnswer(NOW, SaveOwner(2, "cccccccc"), 7), saving) is None

    def state(of: Ledger) -> StopSaveState:
        found = stop_save(answer, of)
        assert found is not None
        return found.state

    assert state(saving) is StopSaveState.SAVING
    assert state(ledger((7, 0, OWNER))) is StopSaveState.COMMITTED
    key = SaveKey(OWNER, 7, SaveKind.CHECKPOINT)
    saving.fail(key, AbortReason.PARTICIPANT_FAILED, "the volume is full")
    saving.aborted(key, "the volume is full")
    assert state(saving) is StopSaveState.FAILED
