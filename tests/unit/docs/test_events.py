"""The page that lists Events names every reason that is posted."""

import re
from pathlib import Path

from trainsync.monitor.server.events import EventReason, MonitorEvent
from trainsync_operator.reconcile.decide.attempts import Transition

from tests.unit.docs.pages import ROOT
from tests.unit.monitor.saves import Clock

PAGE: Path = ROOT / "docs" / "operate.md"


def listed(who: str) -> dict[str, str]:
    """Reasons in the table of the page, and their type."""
    found: dict[str, str] = {}
    for reasons, types, poster in re.findall(
        r"^\| (.+?) \| (.+?) \| (\w+) \|", PAGE.read_text(), re.M
    ):
        if poster == who:
            names, kinds = reasons.split(", "), types.split(", ")
            found |= zip(names, kinds if len(kinds) > 1 else kinds * len(names), strict=True)
    return found


def test_the_monitors_reasons_are_listed_with_their_type() -> None:
    posted = {
        reason.value: "Warning" if MonitorEvent(Clock()(), reason, "").warning else "Normal"
        for reason in EventReason
    }
    assert listed("monitor") == posted


def test_the_operators_transitions_are_listed() -> None:
    assert {transition.value for transition in Transition} <= set(listed("operator"))
