"""Which rule a failure meets, and what follows, case by case."""

import time
from dataclasses import replace
from typing import Any

import pytest
from trainsync.api.failure_policy import FailureClass, FailureRule, RestartScope
from trainsync_operator.reconcile.decide import failure_rules
from trainsync_operator.reconcile.decide.attempts import Transition, backoff, decide
from trainsync_operator.reconcile.decide.failures import Cause, Reason
from trainsync_operator.reconcile.observed import JobPhase, Observed
from trainsync_operator.reconcile.run import SpecError, State

from tests.unit.operator.support import START, healthy, job, make_run, pods, seconds, spec

INFRA, APP = FailureClass.INFRASTRUCTURE, FailureClass.APPLICATION
RUNNING = State(begun=True, start_time=START, active_since=START)
NOW = START + seconds(100)
CAUSE = Cause(
    Reason.JOB_FAILED,
    "The job of cluster main failed: CUDA error: uncorrectable ECC",
    RestartScope.JOB,
    exits=((None, 1), ("ray", 137)),
)


def rule(action: str = "Fail", **criteria: Any) -> dict[str, Any]:
    return {"action": action, **criteria}


def exits(operator: str, *values: int, **more: str) -> dict[str, Any]:
    return {"operator": operator, "values": list(values), **more}


@pytest.mark.parametrize(
    ("criteria", "matches"),
    [
        ({"onClasses": ["Application"]}, True),
        ({"onClasses": ["Infrastructure"]}, False),
        ({"onClasses": ["Infrastructure", "Application"]}, True),
        ({"onExitCodes": exits("In", 137)}, True),
        ({"onExitCodes": exits("In", 1)}, True),
        ({"onExitCodes": exits("In", 2, 3)}, False),
        ({"onExitCodes": exits("NotIn", 2, 3)}, True),
        ({"onExitCodes": exits("NotIn", 1, 137)}, False),
        ({"onExitCodes": exits("In", 1, containerName="ray")}, False),
        ({"onExitCodes": exits("In", 137, containerName="ray")}, True),
        ({"onExitCodes": exits("NotIn", 9, containerName="side")}, False),
        ({"onMessage": "CUDA error.*ECC$"}, True),
        ({"onMessage": "out of memory"}, False),
        ({"onMessage": "CUDA", "onClasses": ["Infrastructure"]}, False),
        ({"onMessage": "CUDA", "onExitCodes": exits("In", 137)}, True),
    ],
)
def test_a_rule_holds_where_all_its_criteria_do(criteria: dict[str, Any], matches: bool) -> None:
    rules = [FailureRule.model_validate(rule(**criteria))]
    assert (failure_rules.first(rules, CAUSE) is not None) is matches


@pytest.mark.parametrize("kind", ["OutOfMemory", "Image", "Stall"])
def test_a_rule_for_the_application_is_for_its_kinds_and_not_the_other_way_round(kind: str) -> None:
    of_kind = replace(CAUSE, failure_class=FailureClass(kind))

    def meets(cause: Cause, *classes: str) -> bool:
        rules = [FailureRule.model_validate(rule(onClasses=list(classes)))]
        return failure_rules.first(rules, cause) is not None

    assert meets(of_kind, "Application"), "as before there were kinds"
    assert meets(of_kind, "Infrastructure", kind)
    assert not meets(of_kind, "Infrastructure")
    assert not meets(CAUSE, kind)


def test_the_message_of_any_cause_counts() -> None:
    rules = [FailureRule.model_validate(rule(onMessage="OOMKilled"))]
    both = replace(CAUSE, all_messages=(CAUSE.message, "Pod x ended: OOMKilled."))
    assert failure_rules.first(rules, CAUSE) is None
    assert failure_rules.first(rules, both) is not None


@pytest.mark.parametrize("changes", [{"counted": False}, {"hopeless": True}])
def test_no_rule_is_for_an_edit_or_a_refused_job(changes: dict[str, bool]) -> None:
    rules = [FailureRule.model_validate(rule(onClasses=["Application"]))]
    assert failure_rules.first(rules, replace(CAUSE, **changes)) is None


@pytest.mark.parametrize(
    ("expression", "text", "found"),
    [
        ("b", "abc", True),
        ("^b", "abc", False),
        ("^a.*c$", "abc", True),
        ("c.*a", "abc", False),
        ("a.*b.*c", "xaxbxcx", True),
        ("ab.*b", "ab", False),
        ("x|b", "abc", True),
        ("x|y", "abc", False),
        (r"\d\d\.", "a 12.", True),
        (r"\.\*", "a.*", True),
        ("[.*]x", "*x", True),
        ("[^a-c]", "abc", False),
        ("a.c", "abc", True),
    ],
)
def test_expressions(expression: str, text: str, found: bool) -> None:
    FailureRule.model_validate(rule(onMessage=expression))
    assert failure_rules.found(expression, text) is found


@pytest.mark.parametrize(
    "expression", ["(a+)+$", "a+", "a*", "a?", "a{2}", "(a)", "[z-a]", "a\\1", "[", ""]
)
def test_expressions_that_may_take_long_are_refused(expression: str) -> None:
    with pytest.raises(SpecError, match=r"rules\[0\]\.onMessage"):
        make_run(spec(failurePolicy={"rules": [rule(onMessage=expression)]}))


def test_matching_takes_no_time_to_speak_of() -> None:
    began = time.process_time()
    failure_rules.found(".*".join("a" * 60) + "b", "a" * 1000)
    assert time.process_time() - began < 0.1


FAILED = healthy((job(JobPhase.FAILED, message="Job entrypoint command failed with exit code 42"),))
LOST_HEAD = healthy((job(JobPhase.RUNNING),), pods=pods()[1:])
CODE = {"onExitCodes": exits("In", 42)}


@pytest.mark.parametrize(
    ("rules", "observed", "expected"),
    [
        ([], FAILED, (Transition.RESTART, 0, 1)),
        ([rule("Fail", **CODE)], FAILED, (Transition.FAIL, 0, 0)),
        (
            [rule("Restart", **CODE), rule("Fail", onMessage=".")],
            FAILED,
            (Transition.RESTART, 0, 1),
        ),
        ([rule("RestartCluster", **CODE)], FAILED, (Transition.RESTART, 1, 1)),
        ([rule("Ignore", **CODE)], FAILED, (Transition.RESTART, 0, 0)),
        ([rule("Fail", **CODE)], LOST_HEAD, (Transition.RESTART, 1, 1)),
        # What is lost with a head is not on the old clusters any more.
        ([rule("Restart", onMessage="head")], LOST_HEAD, (Transition.RESTART, 1, 1)),
    ],
)
def test_what_a_rule_decides(
    rules: list[dict[str, Any]], observed: Observed, expected: tuple[Transition, int, int]
) -> None:
    decision = decide(make_run(spec(failurePolicy={"rules": rules})), RUNNING, observed, NOW)
    after = decision.state
    assert (decision.transition, after.cluster_attempt, after.restarts) == expected
    assert decision.failure_class is APP


def test_a_rule_that_decides_is_named() -> None:
    def decided(action: str) -> str:
        rules = [rule("Fail", onMessage="never"), rule(action, **CODE)]
        return decide(make_run(spec(failurePolicy={"rules": rules})), RUNNING, FAILED, NOW).message

    assert "spec.failurePolicy.rules[1] fails the run. The job of" in decided("Fail")
    assert "exit code 42 spec.failurePolicy.rules[1]: Ignore. Attempt 1" in decided("Ignore")


def test_ignored_failures_wait_longer_each_time_and_end() -> None:
    run = make_run(spec(failurePolicy={"maxRestarts": 0, "rules": [rule("Ignore", **CODE)]}))
    observed = replace(FAILED, jobs=(replace(FAILED.jobs[0], attempt=6),))
    decision = decide(run, replace(RUNNING, attempt=6), observed, NOW)
    assert decision.transition is Transition.RESTART
    assert decision.state.next_attempt_time == NOW + backoff(run, 6)
    assert decision.warning
    last = replace(FAILED, jobs=(replace(FAILED.jobs[0], attempt=999),))
    assert decide(run, replace(RUNNING, attempt=999), last, NOW).transition is Transition.FAIL
