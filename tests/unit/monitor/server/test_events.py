from dataclasses import replace
from typing import Any

from trainsync.api.status import (
    CheckpointStatus,
    ConditionStatus,
    ConditionType,
    MirrorStatus,
    RollbackState,
    RollbackStatus,
    WeightsStatus,
)
from trainsync.monitor.core.views import ConditionView, CoreView
from trainsync.monitor.ledger.saves import AbortCause, AbortReason, SaveKey
from trainsync.monitor.server.events import WAITING_KEPT, EventQueue, EventReason, MonitorEvent

from tests.unit.monitor.page.pages import explorers
from tests.unit.monitor.saves import CHECKPOINT, FIRST, STATE_DICT, Clock

KEY = SaveKey(FIRST, 10, CHECKPOINT)
BOOM = AbortCause(AbortReason.PARTICIPANT_FAILED, "model.0: boom")
UNKNOWN, GOOD, BAD = ConditionStatus.UNKNOWN, ConditionStatus.TRUE, ConditionStatus.FALSE


def view(
    health: ConditionStatus = GOOD, message: str = "why", weights: WeightsStatus | None = None
) -> CoreView:
    healthy = ConditionView(ConditionType.CHECKPOINT_HEALTHY, health, "Reason", message)
    other = ConditionView(ConditionType.WEIGHTS_IN_SYNC, BAD, "Reason", "behind")
    return CoreView(
        attempt=0,
        progress=None,
        checkpoint=CheckpointStatus(),
        weights=weights,
        conditions=(other, healthy),
    )


def fleet(*states: str) -> WeightsStatus:
    who = [explorers(2, state=state)[number] for number, state in enumerate(states)]
    return WeightsStatus(trainer_version=9, lag=0, method="nccl", explorers=who)


def told(queue: EventQueue) -> list[MonitorEvent]:
    return list(iter(queue.take, None))


def said(queue: EventQueue) -> list[tuple[EventReason, str]]:
    return [(event.reason, event.message) for event in told(queue)]


def test_each_flip_of_health_is_told_once() -> None:
    queue = EventQueue(Clock())
    for health in (UNKNOWN, UNKNOWN, GOOD, GOOD, BAD, BAD, GOOD, UNKNOWN):
        queue.see(view(health, f"it is {health.value}"))
    assert said(queue) == [
        (EventReason.CHECKPOINT_UNHEALTHY, "it is False"),
        (EventReason.CHECKPOINT_HEALTHY, "it is True"),
    ]


def test_aborts_are_warnings_with_their_cause_and_skips_are_not_told() -> None:
    queue = EventQueue(Clock())
    queue.aborted(KEY, BOOM)
    queue.aborted(SaveKey(FIRST, 10, STATE_DICT), BOOM)
    queue.aborted(
        SaveKey(FIRST, 11, CHECKPOINT), AbortCause(AbortReason.SKIPPED, "skipped: no slot")
    )
    events = told(queue)
    assert [(event.reason, event.message) for event in events] == [
        (EventReason.CHECKPOINT_ABORTED, "checkpoint 10 of attempt 0: model.0: boom"),
        (EventReason.STATE_DICT_ABORTED, "state_dict 10 of attempt 0: model.0: boom"),
    ]
    assert all(event.warning for event in events)


def test_a_restart_in_place_is_told_and_the_saves_that_it_aborts_are_not() -> None:
    queue = EventQueue(Clock())
    queue.aborted(KEY, AbortCause(AbortReason.RESTARTED, "the attempt is restarted in place (1)"))
    queue.restarted(0, 1, "a trainer's process died")
    (event,) = told(queue)
    assert event.reason is EventReason.RESTARTED_IN_PLACE
    assert event.warning
    assert event.message == "attempt 0 is restarted in its pods (1): a trainer's process died"


def test_every_rank_resumes_and_it_is_told_once() -> None:
    queue = EventQueue(Clock())
    for attempt, step in ((1, 40), (1, 40), (2, 40)):
        queue.resumed(attempt, step)
    for _ in range(3):
        queue.resume_failed(3, "no valid manifest is left")
    events = told(queue)
    assert [(event.message, event.warning) for event in events] == [
        ("attempt 1 resumes from checkpoint 40", False),
        ("attempt 2 resumes from checkpoint 40", False),
        ("attempt 3 cannot resume: no valid manifest is left", True),
    ]


def test_explorers_that_are_lost_and_come_back_are_told_together() -> None:
    queue = EventQueue(Clock())
    for weights in (
        None,
        fleet("running", "running"),
        fleet("lost", "lost"),
        fleet("lost", "lost"),
        None,
        fleet("running", "lost"),
    ):
        queue.see(view(UNKNOWN, weights=weights))
    assert said(queue) == [
        (EventReason.EXPLORER_LOST, "2 explorers are lost: e-0, e-1."),
        (EventReason.EXPLORER_BACK, "Explorer e-0 is back."),
    ]


def test_what_the_monitor_before_told_is_not_told_again() -> None:
    status: dict[str, Any] = {
        "conditions": [
            {"type": "Ready", "status": "True"},
            {"type": "CheckpointHealthy", "status": "False"},
        ],
        "weights": fleet("lost", "running").to_json_dict(),
    }
    queue = EventQueue(Clock())
    queue.begin(status)
    queue.see(view(BAD))
    queue.see(view(BAD, weights=fleet("lost", "running")))
    assert said(queue) == []
    queue.see(view(GOOD, weights=fleet("lost", "lost")))
    assert said(queue) == [
        (EventReason.CHECKPOINT_HEALTHY, "why"),
        (EventReason.EXPLORER_LOST, "Explorer e-1 is lost."),
    ]


def test_a_new_runs_status_is_taken_as_it_is() -> None:
    queue = EventQueue(Clock())
    queue.begin({})
    queue.begin({"weights": {"from": "another version"}})
    queue.see(view(GOOD))
    assert said(queue) == [(EventReason.CHECKPOINT_HEALTHY, "why")]


def test_what_happens_again_while_it_waits_is_counted() -> None:
    clock = Clock()
    queue = EventQueue(clock)
    queue.damaged(CHECKPOINT, "checkpoint 4 is damaged")
    queue.damaged(STATE_DICT, "state_dict 4 is damaged")
    clock.go(5)
    queue.damaged(CHECKPOINT, "checkpoint 4 is damaged")
    events = told(queue)
    assert [(event.reason, event.count) for event in events] == [
        (EventReason.STATE_DICT_DAMAGED, 1),
        (EventReason.CHECKPOINT_DAMAGED, 2),
    ]
    assert events[1].time == clock()


def test_too_many_that_wait_push_the_oldest_out_and_each_wakes_the_poster() -> None:
    dropped, woken = [], []
    queue = EventQueue(Clock(), wake=lambda: woken.append(1), dropped=lambda: dropped.append(1))
    for step in range(WAITING_KEPT + 3):
        queue.aborted(SaveKey(FIRST, step, CHECKPOINT), BOOM)
    assert (len(dropped), len(woken)) == (3, WAITING_KEPT + 3)
    events = told(queue)
    assert len(events) == WAITING_KEPT
    assert events[0].message.startswith("checkpoint 3 of")


def test_the_answer_to_a_rollback_is_told_once_and_not_again_by_the_next_monitor() -> None:
    def asked(state: RollbackState) -> CoreView:
        rollback = RollbackStatus(step=5, state=state, message=f"it is {state}")
        return replace(view(UNKNOWN), checkpoint=CheckpointStatus(rollback=rollback))

    queue = EventQueue(Clock())
    for state in (RollbackState.ACCEPTED, RollbackState.ACCEPTED, RollbackState.DONE):
        queue.see(asked(state))
    assert said(queue) == [
        (EventReason.ROLLBACK_ACCEPTED, "it is Accepted"),
        (EventReason.ROLLED_BACK, "it is Done"),
    ]
    again = EventQueue(Clock())
    done = asked(RollbackState.DONE)
    again.begin({"checkpoint": done.checkpoint.to_json_dict()})
    again.see(done)
    again.see(asked(RollbackState.REFUSED))
    assert [(event.reason, event.warning) for event in told(again)] == [
        (EventReason.ROLLBACK_REFUSED, True)
    ]


def test_a_mirror_that_fails_is_told_once_and_so_is_its_return() -> None:
    queue = EventQueue(Clock())

    def seen(error: str | None) -> None:
        mirror = MirrorStatus(url="s3://b/r", lag_steps=0, error=error)
        queue.see(replace(view(), checkpoint=CheckpointStatus(mirror=mirror)))

    for error in (None, "refused", "refused in other words", None, None):
        seen(error)
    assert [one for one in said(queue) if one[0] is not EventReason.CHECKPOINT_HEALTHY] == [
        (EventReason.MIRROR_FAILED, "refused"),
        (EventReason.MIRROR_BACK, "steps are copied to s3://b/r again"),
    ]
