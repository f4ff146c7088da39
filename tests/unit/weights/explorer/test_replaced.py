"""`ExplorerClient` when another process has its id: it lets go of the trainer by itself."""

from types import SimpleNamespace
from typing import Any

import pytest
from trainsync.weights.errors import ExplorerReplacedError
from trainsync.weights.explorer.client import ExplorerClient
from trainsync.weights.synchronizer import connection
from trainsync.weights.transports.base import Weights, WeightSource
from trainsync.weights.versions import Published

from tests.waiting import eventually


class Replacing:
    """A Synchronizer at which another process registers right after this one."""

    renewals = 0

    def __init__(self, *_: object) -> None:
        self.contact = SimpleNamespace(lease_seconds=0.06)

    def lasts(self) -> bool:
        return True

    def call(self, method: str, *_: object, **__: object) -> Any:
        if method == "register_explorer":
            return -1
        Replacing.renewals += method == "renew"
        raise ExplorerReplacedError("another process registered as explorer e")


class Source(WeightSource):
    """Knows whether it still follows the trainer."""

    follows = True

    def fetch(self, published: Published, timeout: float) -> Weights:
        raise NotImplementedError

    def stop(self) -> None:
        self.follows = False


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> Source:
    monkeypatch.setattr(Replacing, "renewals", 0)
    monkeypatch.setattr(connection, "SynchronizerConnection", Replacing)
    monkeypatch.setattr("trainsync.weights.threads.ray_is_there", lambda: True)
    return Source()


def test_a_replaced_process_leaves_the_trainer_and_gives_no_more_signs_of_life(
    source: Source,
) -> None:
    client = ExplorerClient(None, "e", 5.0, source)
    eventually(lambda: not source.follows, 30.0)
    assert client._registration.timer.wait(30.0), "the thread ends"
    assert Replacing.renewals == 1
    with pytest.raises(ExplorerReplacedError, match="registered as explorer e"):
        client.wait(-1)


def test_a_call_that_hears_of_it_first_lets_go_too(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainsync.weights.threads.ray_is_there", lambda: False)
    client = ExplorerClient(None, "e", 5.0, source)
    with pytest.raises(ExplorerReplacedError):
        client.wait(-1)
    assert not source.follows
    assert client._registration.timer.is_set()
