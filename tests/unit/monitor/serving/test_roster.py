from typing import cast

import pytest
from trainsync.api.protocol import ASLEEP, ServerReport
from trainsync.api.spec import SyncMethod
from trainsync.api.status import ProofVerdict, ServerWeights
from trainsync.monitor.access.served_core import ServedCore
from trainsync.monitor.change_signal import ChangeSignal
from trainsync.monitor.commit.newest import CommitNews
from trainsync.monitor.core.views import with_servers
from trainsync.monitor.errors import TooManyWaitersError
from trainsync.monitor.server.serving_news import VersionNews, newest_version
from trainsync.monitor.serving import roster as rosters
from trainsync.monitor.serving.roster import FORGET_SECONDS, ServerRoster

REPORT = ServerReport(servers="rollouts", tag="7-00", version=7, lag=0, ready=True)


class Seconds:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def tell(roster: ServerRoster, pod: str, **changed: object) -> None:
    with roster.reporting(pod, REPORT.model_copy(update=changed)):
        pass


def shown(roster: ServerRoster) -> list[ServerWeights]:
    view = roster.view()
    return [] if view is None else list(view.shown)


def test_lag_is_to_the_newest_version_and_weights_of_unknown_age_count_as_none() -> None:
    roster = ServerRoster()
    tell(roster, "b", lag=2)
    assert roster.view() is None  # before the newest version is known
    roster.tell_newest(9)
    tell(roster, "a", lag=None)
    tell(roster, "c", version=None, lag=None, tag="default", ready=False)
    assert [(s.name, s.version, s.lag) for s in shown(roster)] == [
        ("a", 7, 10), ("b", 7, 2), ("c", -1, 10)
    ]  # fmt: skip
    roster.tell_newest(3)  # it went back
    assert [s.lag for s in shown(roster)] == [4, 0, 4]


def test_a_server_that_sleeps_is_behind_nothing() -> None:
    roster = ServerRoster()
    roster.tell_newest(9)
    tell(roster, "a", version=None, lag=None, tag=ASLEEP, ready=False)
    assert [(s.version, s.lag, s.ready) for s in shown(roster)] == [(-1, 0, False)]


async def test_what_a_store_has_is_as_new_as_the_synchronizer_says() -> None:
    class Core:
        published: int | None = None

        def newest_published(self) -> int | None:
            return self.published

    core, roster = Core(), ServerRoster(method=SyncMethod.STORE)
    news = VersionNews(CommitNews(), roster, ChangeSignal())
    tell(roster, "a", lag=0)
    news.saw(newest_version(cast(ServedCore, core), SyncMethod.STORE))
    assert [s.lag for s in shown(roster)] == [0], (
        "a trainer may wait for servers before it publishes"
    )
    core.published = 9
    news.saw(newest_version(cast(ServedCore, core), SyncMethod.STORE))
    assert [s.lag for s in shown(roster)] == [2]
    assert news.now().newest is None, "agents look at the store, not at commits"
    found = with_servers(None, roster.view())
    assert found is not None
    assert (found.method, found.trainer_version) == ("store", 9)


def test_a_server_that_is_silent_for_the_deadline_is_gone() -> None:
    clock = Seconds()
    roster = ServerRoster(clock)
    old = ServerWeights(name="old", servers="rollouts", version=1, lag=0, ready=True)
    roster.begin([old], 3)
    assert [(s.name, s.lag) for s in shown(roster)] == [("old", 2)]
    tell(roster, "new")
    clock.now += FORGET_SECONDS - 1
    assert [s.name for s in shown(roster)] == ["new", "old"]
    tell(roster, "new")
    clock.now += 2
    assert [s.name for s in shown(roster)] == ["new"]
    with roster.reporting("new", REPORT):
        clock.now += FORGET_SECONDS + 1  # its request still waits
        assert [s.name for s in shown(roster)] == ["new"]
    clock.now += FORGET_SECONDS + 1
    assert shown(roster) == []


def test_servers_and_requests_of_one_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rosters, "MOST_SERVERS", 3)
    monkeypatch.setattr(rosters, "MOST_SHOWN", 2)
    roster = ServerRoster()
    roster.tell_newest(7)
    tell(roster, "good")
    tell(roster, "bad", verdict=ProofVerdict.REFUTED, ready=False)
    tell(roster, "waits", ready=False)
    with pytest.raises(TooManyWaitersError):
        tell(roster, "more")
    view = roster.view()
    assert view is not None
    assert [s.name for s in view.shown] == ["bad", "waits"]
    assert view.states == {"ready": 1, "not_ready": 1, "refuted": 1}

    def nest(depth: int) -> None:
        with roster.reporting("good", REPORT):
            if depth:
                nest(depth - 1)

    nest(3)
    with pytest.raises(TooManyWaitersError):
        nest(4)
    tell(roster, "good")  # all places are free again


def test_refutations_are_counted_over_agents() -> None:
    roster = ServerRoster()
    roster.tell_newest(7)
    for count in (0, 2, 2, 0, 1):  # a new agent begins at 0
        tell(roster, "a", refutations=count)
    tell(roster, "b", refutations=1)
    view = roster.view()
    assert view is not None
    assert view.refutations == 4
