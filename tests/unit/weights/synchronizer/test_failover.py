"""`SynchronizerFailover`: actors that are rebuilt or followed again. With a fake Ray."""

import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from trainsync.api.spec import Group
from trainsync.weights.synchronizer import actor as synchronizer
from trainsync.weights.synchronizer import failover
from trainsync.weights.synchronizer.actor import MAX_CALLS, Synchronizer
from trainsync.weights.synchronizer.failover import SynchronizerFailover

TIMEOUT = 20.0
NODE = "0" * 56
Call = Callable[[], Any]


class Actor:
    """A handle, whose calls are answered when `FakeRay.get` is called."""

    def __init__(self) -> None:
        self.asked = 0
        self.dead = False
        self.named = True
        self.failures: list[Exception] = []  # of the next questions

    def _follow(self) -> None:
        self.asked += 1
        if self.failures:
            raise self.failures.pop(0)
        if self.dead:
            raise ray.exceptions.ActorDiedError()
        time.sleep(0.002)  # no news

    def _contact(self) -> str:
        if self.dead:
            raise ray.exceptions.ActorDiedError()
        return "here"

    @property
    def follow(self) -> Any:
        return SimpleNamespace(remote=lambda seen, seconds: self._follow)

    @property
    def get_contact(self) -> Any:
        return SimpleNamespace(remote=lambda: self._contact)


class FakeRay:
    """Makes actors of one name, one at a time; a dead actor keeps the name until it is killed."""

    exceptions = ray.exceptions

    def __init__(self) -> None:
        self.actors: list[Actor] = []
        self.options: dict[str, Any] = {}

    def remote(self, kind: type) -> Any:
        def options(**given: Any) -> Any:
            self.options = given
            return SimpleNamespace(remote=self._make)

        return SimpleNamespace(options=options)

    def _make(self, *arguments: Any, **more: Any) -> Actor:
        if self.actors and self.actors[-1].named:
            raise ValueError("the name is taken")
        self.actors.append(Actor())
        return self.actors[-1]

    def kill(self, actor: Actor) -> None:
        actor.dead, actor.named = True, False

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_node_id=lambda: NODE)

    def wait(self, references: list[Call], timeout: float) -> tuple[list[Call], list[Call]]:
        return references, []

    def get(self, reference: Call, timeout: float | None = None) -> Any:
        return reference()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    one = FakeRay()
    monkeypatch.setattr(failover, "ray", one)
    monkeypatch.setattr(failover.threads, "ray", one)
    monkeypatch.setattr(synchronizer, "ray", one)
    monkeypatch.setattr(failover.threads, "ray_is_there", lambda: True)
    return one


@pytest.fixture
def kept(fake: FakeRay) -> Iterator[SynchronizerFailover]:
    one = SynchronizerFailover("ns", retry=0.01, start=0.1, look=0.01)
    yield one
    assert one.close(TIMEOUT)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + TIMEOUT
    while not condition():
        assert time.monotonic() < deadline
        threading.Event().wait(0.002)


@pytest.mark.parametrize(
    "failure",
    [
        ray.exceptions.ActorUnavailableError("cannot be reached", b"0" * 16),
        ray.exceptions.RayActorError(),
    ],
)
def test_an_actor_that_lives_is_followed_again_and_rebuilt_when_it_dies(
    fake: FakeRay, kept: SynchronizerFailover, failure: Exception
) -> None:
    (actor,) = fake.actors
    actor.failures = [failure]
    until(lambda: not actor.failures)
    asked = actor.asked
    until(lambda: actor.asked > asked + 1)
    assert kept.handle is actor
    assert (kept.rebuilds, kept.error) == (0, None)
    actor.dead = True
    until(lambda: kept.rebuilds == 1)
    assert kept.handle is fake.actors[1]


def test_it_is_made_on_this_node_and_has_room_for_a_call_of_every_explorer(
    fake: FakeRay, kept: SynchronizerFailover
) -> None:
    (most,) = (each.le for each in Group.model_fields["replicas"].metadata if hasattr(each, "le"))
    assert fake.options["max_concurrency"] == MAX_CALLS >= 4 * most
    where = fake.options["scheduling_strategy"]
    assert (where.node_id, where.soft) == (NODE, False)
    fake.kill(fake.actors[-1])
    Synchronizer.create("another")
    assert fake.options["max_concurrency"] == MAX_CALLS
