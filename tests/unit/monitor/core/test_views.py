"""What conditions and the status say of servers."""

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from trainsync.api.protocol import ExplorerReport, WeightsReport
from trainsync.api.status import ConditionType, ProofVerdict, ServerWeights
from trainsync.monitor.core.views import CoreView, LeasesView, build
from trainsync.monitor.ledger.ledger import Ledger
from trainsync.monitor.server.status import StatusWriter
from trainsync.monitor.serving.roster import ServersView

from tests.unit.monitor.fakes import UID, FakeApi

PROVEN, REFUTED = ProofVerdict.PROVEN, ProofVerdict.REFUTED


def server(name: str, verdict: ProofVerdict | None, **more: Any) -> ServerWeights:
    fields = {"servers": "rollouts", "version": 5, "lag": 0, "ready": True, **more}
    return ServerWeights(name=name, verdict=verdict, **fields)


def view(*servers: ServerWeights, explorers: int | None = None) -> CoreView:
    found = ServersView(5, servers, {}, 0) if servers else None
    weights = None
    if explorers is not None:
        who = [ExplorerReport(id=f"e{n}", version=4, state="running") for n in range(explorers)]
        weights = WeightsReport(trainer_version=5, method="checkpoint", explorers=who)
    return build(
        Ledger(timedelta(minutes=1)),
        error=None,
        progress=None,
        weights=weights,
        servers=found,
        lag_allowed=1,
        leases=LeasesView(),
    )


def condition(made: CoreView, kind: ConditionType) -> tuple[str, str, str] | None:
    found = [c for c in made.conditions if c.type is kind]
    return (found[0].status.value, found[0].reason, found[0].message) if found else None


_NEW = server("b", None, ready=False)


@pytest.mark.parametrize(
    ("servers", "status", "reason", "named"),
    [
        ([server("a", PROVEN), _NEW], "True", "Proven", ""),
        ([_NEW], "Unknown", "NotProvenYet", "b"),
        ([server("a", PROVEN), server("b", None)], "Unknown", "NotProvenYet", "b"),
        ([server("a", PROVEN), server("b", ProofVerdict.UNPROVEN)], "Unknown", "NoAnswer", "b"),
        ([server("a", PROVEN), server("b", ProofVerdict.ABSENT)], "Unknown", "NoProof", "b"),
        ([server("a", REFUTED, message="off"), _NEW], "False", "Refuted", "a: off"),
        ([server(n, REFUTED) for n in "abcdefg"], "False", "Refuted", "a, b, c, d, e, …"),
    ],
)
def test_weights_are_proven_when_the_last_judgement_of_each_serving_server_says_so(
    servers: list[ServerWeights], status: str, reason: str, named: str
) -> None:
    found = condition(view(*servers), ConditionType.WEIGHTS_PROVEN)
    assert found is not None
    assert found[:2] == (status, reason)
    assert found[2].endswith(named)


def test_a_run_without_servers_has_no_such_condition() -> None:
    assert condition(view(explorers=1), ConditionType.WEIGHTS_PROVEN) is None


def test_a_server_that_is_too_far_behind_is_out_of_sync() -> None:
    kind = ConditionType.WEIGHTS_IN_SYNC
    late = view(server("a", PROVEN), server("b", PROVEN, version=2, lag=3), explorers=1)
    said = "1 of 2 servers are more than 1 behind; b is at version 2"
    assert condition(late, kind) == ("False", "ServersBehind", said)
    assert condition(view(server("a", PROVEN)), kind) == (
        "True", "InSync", "no server is more than 1 behind"
    )  # fmt: skip
    assert condition(view(), kind) == ("Unknown", "NoReport", "no Synchronizer has reported yet")


def weights(made: CoreView, api: FakeApi, before: dict[str, Any] | None = None) -> dict[str, Any]:
    status = {} if before is None else {"weights": before}
    writer = StatusWriter(api, uid=UID, before=status, count=lambda _: None)
    found: dict[str, Any] = writer.render(made)["weights"]
    return found


def test_the_lag_of_the_status_is_the_largest_of_explorers_and_servers(api: FakeApi) -> None:
    found = weights(view(server("a", PROVEN, lag=3), explorers=2), api)
    assert (found["lag"], found["trainerVersion"]) == (3, 5)
    assert (len(found["explorers"]), len(found["servers"])) == (2, 1)
    assert weights(view(server("a", PROVEN), explorers=2), api)["lag"] == 1


def test_without_a_synchronizer_servers_alone_are_shown(api: FakeApi) -> None:
    found = weights(view(server("a", PROVEN)), api)
    assert (found["trainerVersion"], found["method"], found["explorers"]) == (5, "checkpoint", [])


def test_explorers_of_the_monitor_before_stay_until_they_are_reported_and_servers_do_not(
    api: FakeApi,
) -> None:
    explorer = {"id": "e0", "version": 3, "lag": 1, "state": "running"}
    gone = {"name": "old", "servers": "rollouts", "version": 1, "lag": 9, "ready": False}
    before = {
        "trainerVersion": 4, "lag": 9, "method": "checkpoint", "explorers": [explorer],
        "servers": [gone],
    }  # fmt: skip
    found = weights(view(server("a", PROVEN)), api, before)
    assert [e["id"] for e in found["explorers"]] == ["e0"]
    assert [s["name"] for s in found["servers"]] == ["a"]
    assert found["lag"] == 1
    alone = weights(view(server("a", PROVEN)), api, {**before, "explorers": []})
    assert alone["trainerVersion"] == 5


def test_servers_that_are_all_gone_leave_the_status(api: FakeApi) -> None:
    before = weights(view(server("a", PROVEN)), api)
    gone = replace(view(), servers=ServersView(5, (), {}, 0))
    assert weights(gone, api, before)["servers"] == []
    assert condition(gone, ConditionType.WEIGHTS_PROVEN) is None
