"""A save before the pods go: asked for, waited for, and how the wait ends."""

from dataclasses import replace
from datetime import datetime
from typing import Any

import pytest
from trainsync.api.base import format_time
from trainsync.api.status import StopReason, StopRequest
from trainsync_operator.builders.target import MonitorSettings
from trainsync_operator.reconcile import status
from trainsync_operator.reconcile.decide.attempts import Decision, Transition, decide
from trainsync_operator.reconcile.decide.stopping import StopOutcome
from trainsync_operator.reconcile.observed import JobPhase, Observed
from trainsync_operator.reconcile.plan import plan
from trainsync_operator.reconcile.run import Run, State, remembered

from tests.unit.operator.support import (
    START,
    healthy,
    job,
    make_run,
    pods,
    ray_cluster,
    seconds,
    spec,
)

RUNNING = State(begun=True, start_time=START, active_since=START)
NOW = START + seconds(100)
LATER = NOW + seconds(5)
TRAINS = healthy((job(JobPhase.RUNNING),))
PREEMPTED = healthy((job(JobPhase.RUNNING),), ray_clusters=(ray_cluster(suspended=True),))
SUSPEND = spec(suspend=True)


def reported(at: datetime = NOW, **checkpoint: Any) -> dict[str, Any]:
    """The monitor's part of the status."""
    progress = {"step": 9, "lastReportTime": format_time(at)}
    return {"progress": progress, "checkpoint": checkpoint}


def run_of(run_spec: dict[str, Any] | None = None, **checkpoint: Any) -> Run:
    return make_run(run_spec, status=reported(**checkpoint))


def answered(state: str, since: datetime = NOW) -> dict[str, Any]:
    return {"stopSave": {"since": format_time(since), "step": 9, "state": state}}


def asked(reason: StopReason = StopReason.SUSPEND) -> State:
    request = StopRequest(since=NOW, deadline=NOW + seconds(120), reason=reason)
    return replace(RUNNING, stopping=request)


def test_a_suspended_run_that_trains_is_asked_to_save_first() -> None:
    decision = decide(run_of(SUSPEND), RUNNING, TRAINS, NOW)
    assert decision.transition is Transition.STOP
    assert decision.state == asked()
    assert "waits for a save of the present step, for 120 s at most" in decision.message


def test_the_pods_stay_while_the_save_is_waited_for() -> None:
    for observed in (TRAINS, healthy((job(JobPhase.RUNNING),), monitor_ready=False)):
        decision = decide(run_of(SUSPEND), asked(), observed, LATER)
        assert (decision.transition, decision.due) == (None, (NOW + seconds(120),))
    todo = plan(run_of(SUSPEND), asked(), TRAINS, LATER, MonitorSettings("m:1"))
    assert not todo.delete


REQUEST = {"since": format_time(NOW), "deadline": format_time(LATER), "reason": "Suspend"}


def test_what_a_newer_release_adds_to_a_request_and_its_answer_is_ignored() -> None:
    state = remembered({"attempt": 0, "stopping": {**REQUEST, "urgency": "high"}})
    assert state.stopping == StopRequest.model_validate(REQUEST)
    newer = answered("committed")
    newer["stopSave"]["bytes"] = 7
    assert decide(run_of(SUSPEND, **newer), asked(), TRAINS, LATER).stop_outcome == "saved"


def test_a_request_of_a_kind_that_only_a_newer_release_knows_is_none(
    caplog: pytest.LogCaptureFixture,
) -> None:
    unknown = {**REQUEST, "reason": "Defragmentation"}
    for _ in range(3):
        assert remembered({"attempt": 0, "stopping": unknown}).stopping is None
    (told,) = caplog.messages
    assert told.startswith("status.stopping.reason is not understood and counts as none")


def test_an_answer_of_a_kind_that_only_a_newer_monitor_knows_is_waited_past() -> None:
    run = run_of(SUSPEND, **answered("compressing"))
    assert decide(run, asked(), TRAINS, LATER).transition is None
    late = decide(run, asked(), TRAINS, NOW + seconds(120))
    assert late.stop_outcome is StopOutcome.LATE


@pytest.mark.parametrize(
    ("observed", "checkpoint", "now", "outcome", "words"),
    [
        (TRAINS, answered("committed"), LATER, "saved", "Checkpoint 9 is committed"),
        (TRAINS, answered("failed"), LATER, "failed", "The save of step 9 failed"),
        (TRAINS, {"lastCommitted": {"step": 4}}, NOW + seconds(120), "late", "from checkpoint 4"),
        (healthy((job(JobPhase.FAILED),)), {}, LATER, "job_ended", "from its beginning"),
        (healthy((job(JobPhase.RUNNING),), pods=pods()[1:]), {}, LATER, "job_ended", "ended"),
    ],
)
def test_the_wait_ends_with_the_commit_a_failure_or_the_deadline(
    observed: Observed, checkpoint: dict[str, Any], now: datetime, outcome: str, words: str
) -> None:
    decision = decide(run_of(SUSPEND, **checkpoint), asked(), observed, now)
    assert decision.transition is Transition.SUSPEND
    assert decision.state.suspended
    assert decision.state.stopping is None
    assert decision.stop_outcome == StopOutcome(outcome)
    assert decision.warning is (outcome != "saved")
    assert words in decision.message


def test_an_answer_to_an_earlier_request_is_none() -> None:
    for state in ("committed", "failed"):
        run = run_of(SUSPEND, **answered(state, since=NOW - seconds(60)))
        assert decide(run, asked(), TRAINS, LATER).transition is None


@pytest.mark.parametrize(
    ("run", "observed"),
    [
        (make_run(SUSPEND), TRAINS),
        (make_run(SUSPEND, status=reported(START - seconds(1))), TRAINS),
        (run_of(spec(suspend=True, suspendPolicy={"saveDeadlineSeconds": 0})), TRAINS),
        (run_of(SUSPEND), healthy()),
        (run_of(SUSPEND), healthy((job(JobPhase.PENDING),))),
        (run_of(SUSPEND), healthy((job(JobPhase.RUNNING),), monitor_ready=False)),
        (run_of(SUSPEND), healthy((job(JobPhase.RUNNING),), pods=pods()[:2])),
    ],
    ids=[
        "no report", "a report of an earlier attempt", "no deadline", "no job", "no job that runs",
        "no monitor", "a trainer is lost",
    ],
)  # fmt: skip
def test_pods_with_nothing_to_save_go_at_once(run: Run, observed: Observed) -> None:
    decision = decide(run, RUNNING, observed, NOW)
    assert (decision.transition, decision.stop_outcome) == (Transition.SUSPEND, None)


def test_a_job_that_has_been_silent_for_long_may_report_late_and_is_asked() -> None:
    silent = make_run(SUSPEND)
    for age, transition in ((119, Transition.SUSPEND), (120, Transition.STOP)):
        assert decide(silent, RUNNING, TRAINS, START + seconds(age)).transition is transition


def test_a_suspension_that_is_withdrawn_leaves_the_attempt_running() -> None:
    decision = decide(run_of(), asked(), TRAINS, LATER)
    assert (decision.transition, decision.state) == (Transition.RESUME, RUNNING)


def test_a_preempted_run_is_asked_to_save_while_its_pods_are_held() -> None:
    decision = decide(run_of(), RUNNING, PREEMPTED, NOW)
    assert decision.transition is Transition.STOP
    assert decision.state == asked(StopReason.PREEMPTION)
    held = replace(PREEMPTED, pods=pods(alive=False, ready=False))
    wait = decide(run_of(), asked(StopReason.PREEMPTION), held, LATER)
    assert (wait.transition, wait.due) == (None, (NOW + seconds(120),))


def preempted(checkpoint: dict[str, Any], observed: Observed = PREEMPTED) -> Decision:
    return decide(run_of(**checkpoint), asked(StopReason.PREEMPTION), observed, LATER)


def test_after_the_save_a_preempted_run_waits_for_its_queue_in_a_new_attempt() -> None:
    decision = preempted(answered("committed"))
    assert decision.transition is Transition.RESTART
    assert decision.stop_outcome is StopOutcome.SAVED
    assert (decision.state.attempt, decision.state.restarts) == (1, 0)
    assert decision.state.stopping is None
    assert "Checkpoint 9 is committed" in decision.message


def test_a_preemption_without_notice_is_not_waited_for() -> None:
    gone = replace(PREEMPTED, pods=())
    assert decide(run_of(), RUNNING, gone, NOW).transition is Transition.RESTART
    decision = preempted({}, gone)
    assert (decision.transition, decision.stop_outcome) == (
        Transition.RESTART,
        StopOutcome.JOB_ENDED,
    )


def test_the_request_is_in_the_status_and_is_remembered() -> None:
    state = asked()
    built = status.build(run_of(SUSPEND), state, TRAINS, LATER)
    assert built["phase"] == "Suspending"
    assert built["stopping"]["deadline"] == format_time(NOW + seconds(120))
    ready = next(c for c in built["conditions"] if c["type"] == "Ready")
    assert (ready["status"], ready["reason"]) == ("False", "Suspending")
    assert remembered(built).stopping == state.stopping
    later = status.build(make_run(SUSPEND, status=built), state, TRAINS, LATER + seconds(7))
    assert later["conditions"] == built["conditions"], "each second would be a write"


def test_a_preemption_that_is_seen_when_the_queue_has_admitted_the_run_again_is_no_failure() -> (
    None
):
    admitted = healthy((job(JobPhase.RUNNING),), pods=())
    state = asked(StopReason.PREEMPTION)
    decision = decide(run_of(**answered("committed")), state, admitted, LATER)
    assert (decision.state.attempt, decision.state.restarts) == (1, 0)


def test_a_shorter_deadline_holds_at_once() -> None:
    run = run_of(spec(suspend=True, suspendPolicy={"saveDeadlineSeconds": 0}))
    decision = decide(run, asked(), TRAINS, LATER)
    assert decision.transition is Transition.SUSPEND
    assert decision.stop_outcome is StopOutcome.LATE
