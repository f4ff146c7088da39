"""The store follows an API server that ends its watches in every way."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from trainsync.api import names
from trainsync_operator.controller import reflector
from trainsync_operator.controller.reflector import Reflector
from trainsync_operator.kube.client import ApiError, Event, Page
from trainsync_operator.kube.kinds import LEADER_WORKER_SET, OPTIONAL, POD, WATCHED, Kind
from trainsync_operator.kube.objects import Object
from trainsync_operator.kube.store import Store

Step = Event | Exception


def pod(name: str, version: int, uid: str = "") -> Object:
    labels = {names.LABEL_RUN: "tiny"}
    meta = {"name": name, "namespace": "team", "uid": uid or name, "labels": labels}
    return {"metadata": {**meta, "resourceVersion": str(version)}}


class Server:
    """Gives the pages of each list, and the events of each watch, in turn; then it is silent."""

    def __init__(self, lists: list[list[Page] | Exception], watches: list[list[Step]]) -> None:
        self._lists, self._watches = lists, watches
        self.selectors: set[str] = set()
        self.since: list[str] = []

    async def pages(
        self, kind: Kind, namespace: str | None, selector: str = ""
    ) -> AsyncIterator[Page]:
        self.selectors.add(selector)
        pages = self._lists.pop(0)
        if isinstance(pages, Exception):
            raise pages
        for page in pages:
            yield page

    async def watch(
        self, kind: Kind, namespace: str | None, selector: str, version: str
    ) -> AsyncIterator[Event]:
        self.selectors.add(selector)
        self.since.append(version)
        if not self._watches:
            await asyncio.Event().wait()
        for step in self._watches.pop(0):
            if isinstance(step, Exception):
                raise step
            yield step


class Followed:
    """A store, and what was told of, by a reflector of pods."""

    def __init__(self, server: Server, followed: Kind = POD) -> None:
        self.store = Store(kinds=WATCHED + OPTIONAL)
        for kind in {*WATCHED, *OPTIONAL} - {followed}:
            self.store.seen(kind, None)
        self.told: list[tuple[str, bool]] = []

        def told(_: Kind, obj: Object, gone: bool) -> None:
            self.told.append((obj["metadata"]["name"], gone))

        self._task = asyncio.create_task(Reflector(server, self.store, followed, None, told).run())

    @property
    def names(self) -> set[str]:
        return {name for _, name in self.store.names(POD)}

    async def until(self, check: Callable[[], Any]) -> None:
        async with asyncio.timeout(20):
            while not check():
                assert not self._task.done(), self._task.exception()
                await asyncio.sleep(0.001)
        self._task.cancel()


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reflector, "FIRST_RETRY_SECONDS", 0.001)
    monkeypatch.setattr(reflector, "_PAUSE_SECONDS", 0.001)


def first_list(*pods: Object) -> list[Page]:
    return [Page([obj], "10") for obj in pods]


async def test_a_list_in_pages_fills_the_store_and_only_its_end_makes_it_synced() -> None:
    server = Server([first_list(pod("a", 1), pod("b", 2))], [])
    followed = Followed(server)
    assert not followed.store.synced
    await followed.until(lambda: followed.store.synced)
    assert followed.names == {"a", "b"}
    assert followed.told == [("a", False), ("b", False)]
    assert server.selectors == {names.LABEL_RUN}


async def test_a_watch_goes_on_from_the_last_event_where_the_server_ended_it() -> None:
    bookmark = Event("BOOKMARK", {"metadata": {"resourceVersion": "30"}})
    watches: list[list[Step]] = [
        [Event("ADDED", pod("b", 20)), bookmark],
        [Event("DELETED", pod("a", 31))],
    ]
    server = Server([first_list(pod("a", 1))], watches)
    followed = Followed(server)
    await followed.until(lambda: len(server.since) == 3)
    assert server.since == ["10", "30", "31"]
    assert followed.names == {"b"}
    assert followed.told == [("a", False), ("b", False), ("a", True)]


@pytest.mark.parametrize(
    "failure",
    [Event("ERROR", {"code": 410, "message": "too old"}), ApiError("too old", 410)],
)
async def test_after_a_gap_the_list_is_read_again_and_what_it_lacks_is_gone(
    failure: Step,
) -> None:
    lists: list[list[Page] | Exception] = [
        first_list(pod("a", 1), pod("b", 2)),
        [Page([pod("b", 2)], "50")],
    ]
    server = Server(lists, [[failure]])
    followed = Followed(server)
    await followed.until(lambda: len(server.since) == 2)
    assert server.since == ["10", "50"]
    assert followed.names == {"b"}
    assert followed.told == [("a", False), ("b", False), ("tiny", True)]


@pytest.mark.parametrize(
    "failure", [Event("ERROR", {"code": 500, "message": "etcd"}), ApiError("connection reset")]
)
async def test_a_watch_that_breaks_is_taken_up_where_it_was(failure: Step) -> None:
    server = Server([first_list(pod("a", 1))], [[Event("MODIFIED", pod("a", 20)), failure]])
    followed = Followed(server)
    await followed.until(lambda: len(server.since) == 2)
    assert server.since == ["10", "20"]


async def test_a_list_that_fails_is_tried_again() -> None:
    server = Server([ApiError("away"), first_list(pod("a", 1))], [])
    followed = Followed(server)
    await followed.until(lambda: followed.store.synced)


async def test_a_kind_of_which_nothing_is_heard_for_long_is_not_trusted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reflector, "LOST_SECONDS", 0.0)
    failing: list[list[Page] | Exception] = [ApiError("away") for _ in range(10_000)]
    server = Server([first_list(pod("a", 1)), *failing], [[ApiError("away")]])
    followed = Followed(server)
    await followed.until(lambda: server.since and not followed.store.synced)


async def test_a_watch_that_misses_an_event_is_put_right_by_a_list_from_time_to_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reflector, "RELIST_SECONDS", 0.0)
    lists: list[list[Page] | Exception] = [
        first_list(pod("a", 1)),
        *([Page([], "50")] for _ in range(10_000)),
    ]
    followed = Followed(Server(lists, [[]]))
    await followed.until(lambda: ("tiny", True) in followed.told)
    assert followed.names == set()


@pytest.mark.parametrize("status", [403, 404])
async def test_a_kind_that_the_operator_can_do_without_keeps_the_store_from_nothing(
    status: int,
) -> None:
    away = ApiError("no matches for kind", status)
    server = Server([away, away, first_list(pod("a", 1))], [])
    followed = Followed(server, LEADER_WORKER_SET)
    await followed.until(lambda: followed.told)
    assert followed.store.synced
    assert followed.store.get(LEADER_WORKER_SET, "team", "a") is not None


async def test_objects_of_a_kind_whose_crd_goes_are_gone() -> None:
    gone = ApiError("no matches for kind", 404)
    server = Server([first_list(pod("a", 1)), gone], [[gone]])
    followed = Followed(server, LEADER_WORKER_SET)
    await followed.until(lambda: len(followed.told) == 2)
    assert followed.store.get(LEADER_WORKER_SET, "team", "a") is None
    assert followed.told[1] == ("tiny", True)


async def test_objects_of_a_kind_stay_known_while_the_api_server_forbids_it_for_a_moment() -> None:
    forbidden = ApiError("forbidden: RBAC: clusterrole not found", 403)
    server = Server([first_list(pod("a", 1))], [[forbidden], [forbidden]])
    followed = Followed(server, LEADER_WORKER_SET)
    await followed.until(lambda: len(server.since) == 3)
    assert server.since == ["10", "10", "10"]
    assert followed.told == [("a", False)]
    assert followed.store.get(LEADER_WORKER_SET, "team", "a") is not None


async def test_objects_of_a_kind_that_stays_forbidden_are_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reflector, "LOST_SECONDS", 0.02)
    forbidden = ApiError("leaderworkersets is forbidden", 403)
    lists: list[list[Page] | Exception] = [forbidden for _ in range(10_000)]
    server = Server([first_list(pod("a", 1)), *lists], [[forbidden] for _ in range(10_000)])
    followed = Followed(server, LEADER_WORKER_SET)
    await followed.until(lambda: len(followed.told) == 2)
    assert followed.store.synced
    assert followed.store.get(LEADER_WORKER_SET, "team", "a") is None


async def test_a_kind_that_the_operator_needs_is_waited_for() -> None:
    server = Server([ApiError("no matches for kind", 404), first_list(pod("a", 1))], [])
    followed = Followed(server)
    await asyncio.sleep(0)
    assert not followed.store.synced
    await followed.until(lambda: followed.store.synced)
    assert followed.names == {"a"}
