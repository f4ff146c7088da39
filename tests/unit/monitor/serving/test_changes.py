from typing import Any

import pytest
from trainsync.api.status import ProofVerdict, ServerWeights
from trainsync.monitor.serving.changes import between

OF: dict[str, Any] = {"servers": "rollouts", "version": 1, "lag": 0, "ready": False}
GOOD, BAD = ProofVerdict.PROVEN, ProofVerdict.REFUTED


def server(name: str, verdict: ProofVerdict | None, count: int = 0, **more: Any) -> ServerWeights:
    return ServerWeights(name=name, verdict=verdict, refutations=count, **{**OF, **more})


def said(before: list[ServerWeights], now: list[ServerWeights]) -> tuple[str | None, str | None]:
    changes = between({s.name: s for s in before}, {s.name: s for s in now})
    return changes.refuted, changes.proven


_OFF = "Server a does not compute with its version: off by 3."


@pytest.mark.parametrize(
    ("before", "now", "refuted", "proven"),
    [
        ([server("a", GOOD)], [server("a", BAD, 1, message="off by 3")], _OFF, None),
        ([server("a", BAD, 1)], [server("a", BAD, 1)], None, None),
        ([server("a", BAD, 1)], [server("a", GOOD, 1)], None, "Server a is proven again."),
        ([server("a", BAD, 1)], [], None, None),
        ([], [server("a", GOOD)], None, None),
        (
            [server("a", GOOD, 1)],
            [server("a", GOOD, 2)],
            "Server a does not compute with its version.",
            "Server a is proven again.",
        ),
        ([server("a", GOOD, 5)], [server("a", GOOD)], None, None),  # a new agent
        (
            [],
            [server(name, BAD, 1) for name in "abcdef"],
            "6 servers, of which each does not compute with its version: a, b, c, d and 2 more.",
            None,
        ),
    ],
)
def test_a_refutation_and_its_end_are_told_once_together(
    before: list[ServerWeights],
    now: list[ServerWeights],
    refuted: str | None,
    proven: str | None,
) -> None:
    assert said(before, now) == (refuted, proven)
