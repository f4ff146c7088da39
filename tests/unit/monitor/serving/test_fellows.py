"""Agents that pass versions on, as the monitor knows them."""

import pytest
from trainsync.api.protocol import FellowsAnswer
from trainsync.monitor.errors import TooManyWaitersError
from trainsync.monitor.serving import fellows
from trainsync.monitor.serving.fellows import Fellows
from trainsync.monitor.serving.roster import SILENT_SECONDS


def _names(answer: FellowsAnswer) -> list[str]:
    return [fellow.name for fellow in answer.fellows]


def test_agents_hear_of_one_another_and_not_of_those_that_are_silent() -> None:
    now = 0.0
    known = Fellows(lambda: now)
    first = known.report("b", "10.0.0.2:7")
    assert (first.me, first.fellows) == ("b", [])
    second = known.report("a", "10.0.0.1:7")
    assert [(f.name, f.address) for f in second.fellows] == [("b", "10.0.0.2:7")]
    assert first.key == second.key
    assert first.key not in repr(first)
    now = SILENT_SECONDS
    assert _names(known.report("c", "10.0.0.3:7")) == ["a", "b"]
    now += SILENT_SECONDS
    assert _names(known.report("a", "10.0.0.1:8")) == ["c"]
    assert _names(known.report("c", "10.0.0.3:7")) == ["a"]


def test_each_monitor_has_a_key_of_its_own() -> None:
    assert Fellows().report("a", "10.0.0.1:7").key != Fellows().report("a", "10.0.0.1:7").key


def test_more_agents_than_the_most_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fellows, "MOST_SERVERS", 1)
    known = Fellows()
    known.report("a", "10.0.0.1:7")
    known.report("a", "10.0.0.1:8")
    with pytest.raises(TooManyWaitersError, match="1 agents"):
        known.report("b", "10.0.0.1:7")
