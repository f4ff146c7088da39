"""Tied weights with ``nccl``: they travel once, and arrive under every name that is expected."""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import ray
import torch
from trainsync.engines.publish.sent_tensors import described, sent_tensors
from trainsync.weights.errors import SchemaMismatchError
from trainsync.weights.explorer.client import ExplorerClient
from trainsync.weights.synchronizer import connection
from trainsync.weights.transports.base import meta_of
from trainsync.weights.transports.broadcast.broadcaster import BroadcastReport, WeightBroadcaster
from trainsync.weights.transports.broadcast.deadlines import Deadlines
from trainsync.weights.transports.broadcast.receiver import WeightReceiver
from trainsync.weights.versions import Published, VersionMeta

DEADLINES = Deadlines(whole=30.0, bucket=10.0, connect=10.0, silence=10.0)


class Model(torch.nn.Module):
    def __init__(self, *, tied: bool, wide: int = 3) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(50, wide)
        self.head = torch.nn.Linear(wide, 50, bias=False)
        if tied:
            self.head.weight = self.embed.weight


class Trainer:
    def __init__(self, *, delta: bool) -> None:
        self.module = Model(tied=True)
        self.broadcaster = WeightBroadcaster(
            0, "127.0.0.1", bucket_size=256, deadlines=DEADLINES, shared_memory=None, delta=delta
        )

    def send(self, version: int) -> BroadcastReport:
        with torch.no_grad():
            self.module.embed.weight[0, 0] = version
        return self.broadcaster.broadcast(
            version, lambda: sent_tensors(self.module), describe=lambda: described(self.module)
        )


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def joined(stack: ExitStack, trainer: Trainer, model: Model | None) -> WeightReceiver:
    expected = None if model is None else [meta_of(*named) for named in model.state_dict().items()]
    source = WeightReceiver(
        "e", lambda: trainer.broadcaster.endpoint, expected=expected, deadlines=DEADLINES
    )
    stack.callback(trainer.broadcaster.close)
    stack.callback(source.close)
    assert trainer.broadcaster.wait_for(1, 10.0)
    return source


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("model", [Model(tied=True), Model(tied=False), None])
def test_a_tied_trainer_serves_tied_and_untied_explorers(
    model: Model | None, delta: bool, stack: ExitStack
) -> None:
    trainer = Trainer(delta=delta)
    source = joined(stack, trainer, model)
    for version in (1, 2):
        report = trainer.send(version)
        assert (report.served, report.refused) == (("e",), {})
        assert report.bytes == 50 * 3 * 4, "tied weights travel once"
        meta = VersionMeta(version, str(report.digest), (), "nccl", report.bytes)
        got = source.fetch(Published(meta), 10.0).state_dict
        assert set(got) == {"embed.weight", "head.weight"}
        for tensor in got.values():
            assert torch.equal(tensor, trainer.module.embed.weight)


def test_an_explorer_hears_at_once_what_differs_from_what_it_expects(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get(reference: threading.Event, timeout: float) -> None:
        raise ray.exceptions.GetTimeoutError("never published")

    fake = SimpleNamespace(
        get=get,
        wait=lambda refs, timeout: time.sleep(0.01) or ([], refs),
        exceptions=ray.exceptions,
        is_initialized=lambda: False,  # the explorer's lease thread asks; it ends, as without Ray
    )
    synchronizer: Any = SimpleNamespace()
    for name in ("wait_new_model_state_dict", "register_explorer", "leave", "get_contact"):
        setattr(synchronizer, name, SimpleNamespace(remote=lambda *_, **__: None))

    class Quiet(connection.SynchronizerConnection):
        def __init__(self, *_: Any) -> None:
            self._handle = synchronizer
            self.contact = SimpleNamespace(lease_seconds=30.0, kept=False)  # type: ignore[assignment]

        def call(self, method: str, *arguments: Any, **options: Any) -> Any:
            if method == "wait_new_model_state_dict":
                monkeypatch.setattr(connection, "ray", fake)
                monkeypatch.setattr(connection.threads, "ray", fake)
                return super().call(method, *arguments, **options)
            return None

    monkeypatch.setattr(connection, "SynchronizerConnection", Quiet)
    trainer = Trainer(delta=False)
    source = joined(stack, trainer, Model(tied=False, wide=4))
    client = ExplorerClient(None, "e", 20.0, source)
    threading.Timer(0.2, trainer.send, [1]).start()
    started = time.monotonic()
    told = r"version 1: .*embed.weight is float32\[50, 3\] instead of float32\[50, 4\]"
    with pytest.raises(SchemaMismatchError, match=told):
        client.wait_and_fetch(-1)
    assert time.monotonic() - started < 15
    with pytest.raises(Exception, match="did not answer") as once:
        client.wait(-1, 0.1)
    assert not isinstance(once.value, SchemaMismatchError), "once for each version"
    client.leave()
