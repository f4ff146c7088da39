"""`ExplorerClient`: waiting for a version and fetching it share one timeout."""

import time
from types import SimpleNamespace
from typing import Any

import pytest
from trainsync.weights.explorer.client import ExplorerClient
from trainsync.weights.synchronizer import connection
from trainsync.weights.transports.base import Weights, WeightSource
from trainsync.weights.versions import MEMORY, Published, VersionMeta

WAITED = 0.3


class SlowSynchronizer:
    """Publishes version 1 after some time."""

    def __init__(self, *_: object) -> None:
        self.contact = SimpleNamespace(lease_seconds=30.0)

    def call(self, method: str, *_: object, **__: object) -> Any:
        if method == "wait_new_model_state_dict":
            time.sleep(WAITED)  # a version that takes this long to come
            return 1
        return Published(VersionMeta(1, "digest", (), MEMORY, 0))


class Source(WeightSource):
    """Knows how long it was given."""

    seconds = 0.0

    def fetch(self, published: Published, timeout: float) -> Weights:
        self.seconds = timeout
        return Weights(published.meta.version, published.meta.digest, {}, 0, 0.0)


@pytest.mark.parametrize(
    ("client_seconds", "wait_seconds", "least", "most"),
    [
        (50.0, None, 40.0, 50.0 - WAITED),  # what waiting has left
        (50.0, 10.0, 40.0, 50.0 - WAITED),  # a short wait does not make fetching shorter
        (5.0, 60.0, 50.0, 60.0 - WAITED),
        (0.1, None, 1.0, 1.0),  # waited for to the last moment
    ],
)
def test_fetching_has_what_waiting_has_left_of_the_time(
    monkeypatch: pytest.MonkeyPatch,
    client_seconds: float,
    wait_seconds: float | None,
    least: float,
    most: float,
) -> None:
    monkeypatch.setattr(connection, "SynchronizerConnection", SlowSynchronizer)
    source = Source()
    client = ExplorerClient(None, "e", client_seconds, source)
    try:
        assert client.wait_and_fetch(0, wait_seconds) is not None
    finally:
        client.leave()
    assert least <= source.seconds <= most
