"""`ExplorerClient` without ``expected``: the first version sets the schema."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trainsync.weights.errors import SchemaMismatchError, WeightsTimeoutError
from trainsync.weights.explorer.client import ExplorerClient
from trainsync.weights.synchronizer import connection
from trainsync.weights.transports.base import Weights, WeightSource
from trainsync.weights.versions import MEMORY, Published, VersionMeta

FIRST = {"w": torch.ones(2, 3), "b": torch.ones(3)}


class Synchronizer:
    """Publishes ``newest``, and records refusals."""

    def __init__(self) -> None:
        self.contact = SimpleNamespace(lease_seconds=30.0)
        self.newest = 0
        self.refused: list[tuple[int, str]] = []

    def call(self, method: str, *arguments: Any, **_: object) -> Any:
        if method == "wait_new_model_state_dict":
            if self.newest <= arguments[0]:
                raise WeightsTimeoutError("none came")
            return self.newest
        if method == "refuse":
            self.refused.append(arguments[2:4])
        return Published(VersionMeta(self.newest, "digest", (), MEMORY, 0))


class Source(WeightSource):
    """Brings ``state``."""

    state = FIRST

    def fetch(self, published: Published, timeout: float) -> Weights:
        return Weights(published.meta.version, published.meta.digest, self.state, 0, 0.0)


class Explorer:
    """A client and its Synchronizer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **options: bool) -> None:
        self.synchronizer, self.source = Synchronizer(), Source()
        monkeypatch.setattr(connection, "SynchronizerConnection", lambda *_: self.synchronizer)
        self.client = ExplorerClient(None, "e", 20.0, self.source, **options)

    def take(self, state: dict[str, torch.Tensor]) -> int:
        self.synchronizer.newest += 1
        self.source.state = state
        weights = self.client.wait_and_fetch(self.synchronizer.newest - 1, 0.0)
        assert weights is not None
        self.client.acknowledge(weights)
        return weights.version


@pytest.mark.parametrize(
    ("other", "said"),
    [
        (
            {**FIRST, "w": FIRST["w"].to(torch.float8_e4m3fn)},
            r"w is float8_e4m3fn\[2, 3\] instead of float32\[2, 3\]",
        ),
        ({**FIRST, "b": torch.ones(4)}, r"b is float32\[4\] instead of float32\[3\]"),
        ({"w": FIRST["w"]}, "b is missing"),
        ({**FIRST, "c": torch.ones(1)}, "c is not expected"),
    ],
)
def test_what_is_not_like_the_version_taken_first_is_refused(
    monkeypatch: pytest.MonkeyPatch, other: dict[str, torch.Tensor], said: str
) -> None:
    one = Explorer(monkeypatch)
    assert one.take(FIRST) == 1
    with pytest.raises(SchemaMismatchError, match=rf"^version 2: .*{said}"):
        one.take(other)
    with pytest.raises(SchemaMismatchError, match=said):
        one.client.fetch()
    ((version, cause),) = one.synchronizer.refused
    assert (version, "unlike the version taken first" in cause) == (2, True)
    assert one.take(dict(reversed(FIRST.items()))) == 3, "the order is of no matter"
    one.client.leave()


def test_a_schema_that_was_never_taken_is_not_binding(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Explorer(monkeypatch)
    one.synchronizer.newest = 1
    assert one.client.wait_and_fetch(0, 0.0) is not None  # and the engine refuses it, say
    assert one.take({"other": torch.ones(1)}) == 2
    one.client.leave()


def test_an_explorer_that_takes_anything_takes_another_schema(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    one = Explorer(monkeypatch, schema_may_change=True)
    assert one.take(FIRST) == 1
    assert one.take({"other": torch.ones(1)}) == 2
    one.client.leave()
