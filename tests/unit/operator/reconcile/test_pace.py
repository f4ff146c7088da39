"""When counts of a run's status are written."""

import copy
from typing import Any

import pytest
from trainsync_operator.reconcile.pace import LONGEST_SECONDS, SECONDS, Pace, counts_alone

from tests.unit.operator.support import START, seconds

BEFORE: dict[str, Any] = {
    "phase": "Starting",
    "readyClusters": "0/1",
    "pods": [{"role": "Trainer", "held": 0}],
    "clusters": [{"name": "main", "readyWorkers": 0, "jobStatus": "PENDING"}],
    "conditions": [
        {"type": "Ready", "status": "False", "reason": "Waiting", "message": "0 of 1"},
        {"type": "Suspended", "status": "False", "reason": "NotSuspended", "message": ""},
    ],
}


def _changed(*path: Any, value: Any) -> dict[str, Any]:
    after = copy.deepcopy(BEFORE)
    place: Any = after
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return after


COUNTED = _changed("clusters", 0, "readyWorkers", value=1)


@pytest.mark.parametrize(
    ("after", "alone"),
    [
        (BEFORE, False),
        (COUNTED, True),
        (_changed("readyClusters", value="1/1"), True),
        (_changed("pods", 0, "held", value=1), True),
        (_changed("conditions", 0, "message", value="1 of 1"), True),
        (_changed("conditions", 0, "reason", value="Queued"), False),
        (_changed("conditions", 1, "message", value="It saves."), False),
        (_changed("conditions", 0, "status", value="True"), False),
        (_changed("clusters", 0, "jobStatus", value="RUNNING"), True),
        (_changed("clusters", 0, "lastPodFailure", value="OOMKilled"), False),
        (_changed("problem", value="ImagePullBackOff"), False),
        (_changed("phase", value="Running"), False),
    ],
)
def test_what_a_person_acts_on_is_no_count(after: dict[str, Any], alone: bool) -> None:
    assert counts_alone(BEFORE, after) is alone


def test_counts_wait_since_the_last_write_and_are_due_then() -> None:
    pace: Pace[str] = Pace()
    assert not pace.waits("run", BEFORE, COUNTED, START), "after a start of the operator"
    pace.wrote("run", START)
    assert pace.waits("run", BEFORE, COUNTED, START)
    assert pace.due("run") == [START + seconds(SECONDS)]
    assert not pace.waits("run", BEFORE, _changed("phase", value="Running"), START)
    assert pace.due("run") == []
    assert not pace.waits("run", BEFORE, COUNTED, START + seconds(SECONDS))


def test_a_clock_that_was_set_back_holds_nothing_up() -> None:
    pace: Pace[str] = Pace()
    pace.wrote("run", START)
    assert not pace.waits("run", BEFORE, COUNTED, START - seconds(3600))


def test_counts_wait_longer_while_many_runs_are_written() -> None:
    pace: Pace[int] = Pace()
    for run in range(540):  # nine a second
        pace.wrote(run, START + seconds(run / 9))
    now = START + seconds(59.95)
    assert pace.waits(539, BEFORE, COUNTED, now)
    assert pace.due(539) == [START + seconds(539 / 9 + LONGEST_SECONDS)]
    assert not pace.waits(100, BEFORE, COUNTED, now), "it was written long ago"
    later = now + seconds(120)
    pace.wrote(1, later)
    assert pace.waits(1, BEFORE, COUNTED, later)
    assert pace.due(1) == [later + seconds(SECONDS)], "the rush is over"


def test_a_due_time_is_that_of_the_rush_in_which_it_was_set() -> None:
    pace: Pace[int] = Pace()
    for run in range(5400):
        pace.wrote(run, START)
    assert pace.waits(1, BEFORE, COUNTED, START)
    assert pace.due(1) == [START + seconds(LONGEST_SECONDS)]
