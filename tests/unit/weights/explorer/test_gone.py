"""`ExplorerClient` when the bytes of the published version are not to be seen for a while."""

import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from trainsync.weights.errors import WeightsReplacedError, WeightsTimeoutError
from trainsync.weights.explorer.client import ExplorerClient
from trainsync.weights.synchronizer import connection
from trainsync.weights.transports.base import Weights, WeightSource
from trainsync.weights.versions import CHECKPOINT, CheckpointLocation, Published, VersionMeta


class Synchronizer:
    """Publishes ``newest``."""

    newest = 1

    def __init__(self, *_: object) -> None:
        self.contact = SimpleNamespace(lease_seconds=30.0)

    def call(self, method: str, *arguments: Any, **_: object) -> Any:
        if method == "wait_new_model_state_dict":
            current, seconds = arguments[:2]
            if self.newest > current:
                return self.newest
            time.sleep(min(seconds, 0.01))
            raise WeightsTimeoutError("none came")
        location = CheckpointLocation("global_step_1", "sha256:1", 0, self.newest)
        meta = VersionMeta(self.newest, "digest", (), CHECKPOINT, 0)
        return Published(meta, location=location)


class Volume(WeightSource):
    """Shows no version for the first ``hidden`` fetches."""

    def __init__(self) -> None:
        self.hidden = 0
        self.asked: list[int] = []

    def fetch(self, published: Published, timeout: float) -> Weights:
        version = published.meta.version
        self.asked.append(version)
        if len(self.asked) <= self.hidden:
            raise WeightsReplacedError(f"version {version} is gone: no manifest")
        return Weights(version, published.meta.digest, {}, 0, 0.0)


@pytest.fixture
def volume() -> Volume:
    return Volume()


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch, volume: Volume) -> Iterator[ExplorerClient]:
    monkeypatch.setattr(connection, "SynchronizerConnection", Synchronizer)
    client = ExplorerClient(None, "e", 20.0, volume)
    yield client
    client.leave()


def test_a_version_that_is_not_to_be_seen_for_a_moment_is_taken_after_it(
    client: ExplorerClient, volume: Volume
) -> None:
    volume.hidden = 2
    weights = client.wait_and_fetch(0)
    assert weights is not None
    assert (weights.version, volume.asked) == (1, [1, 1, 1])


def test_a_version_that_stays_away_is_named_when_the_time_is_over(
    client: ExplorerClient, volume: Volume
) -> None:
    volume.hidden = 10**9
    with pytest.raises(WeightsTimeoutError, match=r"1 is gone: no manifest; no newer .* in time"):
        client.wait_and_fetch(0, 0.05)


def test_a_newer_version_is_taken_instead(
    client: ExplorerClient, volume: Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume.hidden = 1
    genuine = volume.fetch

    def fetch(published: Published, timeout: float) -> Weights:
        try:
            return genuine(published, timeout)
        finally:
            monkeypatch.setattr(Synchronizer, "newest", 2)

    monkeypatch.setattr(volume, "fetch", fetch)
    weights = client.wait_and_fetch(0)
    assert weights is not None
    assert (weights.version, volume.asked) == (2, [1, 2])


class Restarted(Synchronizer):
    """Its trainers were restarted in place, and publish version 1 anew."""

    acknowledged: ClassVar[list[tuple[Any, ...]]] = []

    def call(self, method: str, *arguments: Any, **more: object) -> Any:
        if method == "wait_new_model_state_dict":
            current, known = arguments[0], arguments[4] if len(arguments) > 4 else 0
            if (1, self.newest) > (known, current):
                return self.newest
            raise WeightsTimeoutError("none came")
        if method == "acknowledge":
            self.acknowledged.append(arguments)
        found = super().call(method, *arguments, **more)
        return replace(found, restarts=1) if isinstance(found, Published) else found


def test_a_version_of_restarted_trainers_is_taken_though_its_number_is_lower(
    monkeypatch: pytest.MonkeyPatch, volume: Volume
) -> None:
    monkeypatch.setattr(connection, "SynchronizerConnection", Restarted)
    client = ExplorerClient(None, "e", 20.0, volume)
    client.refused = 14
    weights = client.wait_and_fetch(13, 0.05)
    assert weights is not None
    assert (weights.version, weights.restarts) == (1, 1)
    client.acknowledge(weights)
    assert Restarted.acknowledged[-1][2:] == (1, "digest", {}, 1)
    with pytest.raises(WeightsTimeoutError):
        client.wait_and_fetch(1, 0.05)
    client.leave()
