"""A failure that a node explains which Kubernetes calls lost only after it."""

from dataclasses import replace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from trainsync.api.failure_policy import FailureClass
from trainsync_operator.metrics.metrics import Metrics
from trainsync_operator.reconcile import status
from trainsync_operator.reconcile.decide.attempts import Transition, decide
from trainsync_operator.reconcile.observed import Job, JobPhase, Observed
from trainsync_operator.reconcile.run import Run, State

from tests.unit.operator.support import START, healthy, job, make_run, pod, seconds, spec

NOW = START + seconds(100)
ENDED = NOW - seconds(2)
KNOWN = NOW + seconds(40)
RUN = make_run()


def failed(run: Run = RUN) -> State:
    """After attempt 0, whose job Ray failed while Kubernetes called all pods ready."""
    running = State(begun=True, start_time=START, active_since=START)
    decision = decide(run, running, healthy((job(JobPhase.FAILED),)), NOW)
    assert decision.transition is Transition.RESTART
    assert (decision.state.restarts, decision.state.infrastructure_restarts) == (1, 0)
    return decision.state


def silent(**changes: Any) -> Observed:
    """The next attempt on the same pods, one of which is on a node that is lost."""
    values = {"ready": False, "disruption": "NodeNotReady", **changes}
    return healthy(pods=(pod("Head", 0), pod("Trainer", 0), pod("Trainer", 1, **values)))


@pytest.mark.parametrize("disruption", ["NodeNotReady", "DeletionByTaintManager"])
def test_it_is_put_down_to_the_node_once_and_the_attempt_goes_on(disruption: str) -> None:
    observed = silent(disruption=disruption)
    decision = decide(RUN, failed(), observed, KNOWN)
    assert decision.transition is None
    for state in (decision.state, decide(RUN, decision.state, observed, KNOWN).state):
        assert (state.restarts, state.infrastructure_restarts) == (0, 1)
        assert state.last_failure is not None
        assert state.last_failure.failure_class is FailureClass.INFRASTRUCTURE
        assert state.last_failure.message.startswith(f"Pod trainer-1: {disruption}. The job")


def test_the_run_still_has_the_restart_that_the_node_had_used_up() -> None:
    run = make_run(spec(failurePolicy={"maxRestarts": 1}))
    state = decide(run, failed(run), silent(), KNOWN).state
    again = healthy((job(JobPhase.FAILED, attempt=1),))
    assert decide(run, state, again, KNOWN).transition is Transition.RESTART
    assert decide(run, failed(run), again, KNOWN).transition is Transition.FAIL


def reporting(at: str) -> Run:
    return make_run(status={"progress": {"step": 1, "lastReportTime": at}})


def ruled(**policy: Any) -> Run:
    return make_run(spec(failurePolicy=policy))


@pytest.mark.parametrize(
    ("run", "observed", "after"),
    [
        (RUN, healthy(), 40),
        (RUN, silent(created=NOW + seconds(1)), 40),
        (RUN, silent(disruption="EvictionByEvictionAPI"), 40),
        (RUN, silent(), 181),
        (reporting("2026-01-01T00:02:00Z"), silent(), 40),
        (ruled(rules=[{"action": "Ignore", "onMessage": "nothing"}]), silent(), 40),
        (ruled(maxInfrastructureRestarts=0), silent(), 40),
    ],
    ids=[
        "no node is lost", "a pod that came later", "a drain", "too late",
        "it has trained since", "a rule ignores failures", "none is left",
    ],
)  # fmt: skip
def test_it_stays_the_applications(run: Run, observed: Observed, after: int) -> None:
    state = decide(run, failed(run), observed, NOW + seconds(after)).state
    assert (state.restarts, state.infrastructure_restarts) == (1, 0)


def test_what_was_killed_for_its_memory_stays_so() -> None:
    before = failed()
    assert before.last_failure is not None
    killed = before.last_failure.model_copy(update={"failure_class": FailureClass.OUT_OF_MEMORY})
    assert decide(RUN, replace(before, last_failure=killed), silent(), KNOWN).state.restarts == 1


def test_the_counter_of_restarts_does_not_go_back() -> None:
    metrics = Metrics(CollectorRegistry())
    state = failed()
    for now in (NOW, KNOWN):
        state = decide(RUN, state, silent() if now is KNOWN else healthy(), now).state
        metrics.seen(RUN, status.build(RUN, state, silent(), now))
    labels = {"namespace": "team", "run": "tiny"}
    values = [
        metrics.registry.get_sample_value(f"trainsync_run_{name}restarts_total", labels)
        for name in ("", "infrastructure_")
    ]
    assert values == [1, 1]


LAST = ruled(maxRestarts=0)
FAILED = job(JobPhase.FAILED, ended=ENDED, message="An actor died.")
RUNNING = State(begun=True, start_time=START, active_since=START)


def spread(*jobs: Job, **changes: Any) -> Observed:
    """Pods on two nodes."""
    return healthy(
        jobs or (FAILED,),
        pods=(
            pod("Head", 0, node="a"),
            pod("Trainer", 0, node="a"),
            pod("Trainer", 1, **{"node": "b", **changes}),
        ),
    )


def test_a_failure_that_would_end_the_run_waits_until_a_lost_node_would_be_known() -> None:
    decision = decide(LAST, RUNNING, spread(), NOW)
    assert (decision.transition, decision.state) == (None, RUNNING)
    (again,) = decision.due
    assert decide(LAST, RUNNING, spread(), again - seconds(1)).transition is None
    assert decide(LAST, RUNNING, spread(), again).transition is Transition.FAIL
    run = reporting("2026-01-01T00:01:00Z")
    shown = status.build(run, RUNNING, spread(), NOW)
    assert (shown["phase"], shown["problem"]) == ("Running", "JobFailed")
    (ready,) = [each for each in shown["conditions"] if each["type"] == "Ready"]
    assert (ready["status"], ready["reason"]) == ("False", "JobFailed")
    assert "unless Kubernetes tells of a lost node within 60 s. An actor died." in ready["message"]


@pytest.mark.parametrize("rules", [[], [{"action": "Fail", "onClasses": ["Application"]}]])
def test_the_run_that_waits_goes_on_when_the_node_is_lost(rules: list[dict[str, Any]]) -> None:
    run = ruled(maxRestarts=0, rules=rules)
    assert decide(run, RUNNING, spread(), NOW).transition is None
    lost = spread(ready=False, disruption="NodeNotReady")
    decision = decide(run, RUNNING, lost, NOW + seconds(50))
    assert decision.transition is Transition.RESTART
    assert (decision.state.restarts, decision.state.infrastructure_restarts) == (0, 1)


@pytest.mark.parametrize(
    ("run", "observed"),
    [
        (LAST, spread(node="a")),
        (LAST, spread(job(JobPhase.FAILED))),
        (LAST, spread(job(JobPhase.STOPPED, ended=ENDED))),
        (LAST, spread(job(JobPhase.INVALID, ended=ENDED))),
        (LAST, spread(alive=False, ended="OOMKilled, exit code 137")),
        (LAST, spread(alive=False)),
        (ruled(maxRestarts=0, maxInfrastructureRestarts=0), spread()),
        (ruled(rules=[{"action": "Fail", "onMessage": "actor died"}]), spread()),
    ],
    ids=[
        "one node", "the job's end is unknown", "the job was stopped", "KubeRay refuses the job",
        "out of memory", "a trainer pod is gone", "no restart is left", "a rule says so",
    ],
)  # fmt: skip
def test_what_no_lost_node_can_explain_ends_the_run_at_once(run: Run, observed: Observed) -> None:
    assert decide(run, RUNNING, observed, NOW).transition is Transition.FAIL
