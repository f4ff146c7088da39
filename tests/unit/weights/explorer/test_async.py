"""Engines whose methods are coroutines: taken by `AsyncExplorerClient`, refused by `update`."""

import asyncio
import time
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trainsync.weights.errors import WeightsTimeoutError
from trainsync.weights.explorer.async_client import AsyncExplorerClient
from trainsync.weights.explorer.client import ExplorerClient
from trainsync.weights.synchronizer import connection
from trainsync.weights.transports.base import Weights, WeightSource
from trainsync.weights.versions import MEMORY, Published, VersionMeta

STATE = {"w": torch.ones(2, 3), "b": torch.ones(3)}
Named = Iterable[tuple[str, torch.Tensor]]


class Synchronizer:
    """Publishes ``newest``, and records the calls."""

    def __init__(self) -> None:
        self.contact = SimpleNamespace(lease_seconds=30.0)
        self.newest = 0
        self.told: list[tuple[str, int]] = []

    def call(self, method: str, *arguments: Any, **_: object) -> Any:
        if method == "wait_new_model_state_dict":
            deadline = time.monotonic() + arguments[1]
            while self.newest <= arguments[0]:
                if time.monotonic() >= deadline:
                    raise WeightsTimeoutError("none came")
                time.sleep(0.01)
            return self.newest
        if method in ("acknowledge", "refuse"):
            self.told.append((method, arguments[2]))
        return Published(VersionMeta(self.newest, "digest", (), MEMORY, 0))


class Source(WeightSource):
    def __init__(self, *, keepable: bool = False) -> None:
        self.keepable = keepable
        self.keeps = 0

    def fetch(self, published: Published, timeout: float) -> Weights:
        meta = published.meta
        return Weights(meta.version, meta.digest, STATE, 0, 0.0, keepable=self.keepable)

    def keep(self) -> None:
        self.keeps += 1


class AsyncEngine:
    """A slow engine that fails or never ends on command."""

    def __init__(self) -> None:
        self.version = -1
        self.loaded: list[str] = []
        self.loading = asyncio.Event()
        self.failure: Exception | None = None
        self.hangs = False

    def begin_update(self, version: int) -> None:
        self.version = version

    async def load_weights(self, weights: Named) -> None:
        self.loading.set()
        if self.failure is not None:
            raise self.failure
        if self.hangs:
            await asyncio.Event().wait()
        await asyncio.sleep(0.05)
        self.loaded = [name for name, _ in weights]


class PlainEngine:
    def __init__(self) -> None:
        self.loaded: list[str] = []

    def begin_update(self, version: int) -> None:
        pass

    def load_weights(self, weights: Named) -> None:
        time.sleep(0.05)
        self.loaded = [name for name, _ in weights]


class KeepingEngine(PlainEngine):
    keeps_weights = True

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[str] = []

    def keep_weights(self, weights: Named) -> None:
        self.kept = [name for name, _ in weights]


@pytest.fixture
def synchronizer(monkeypatch: pytest.MonkeyPatch) -> Synchronizer:
    made = Synchronizer()
    monkeypatch.setattr(connection, "SynchronizerConnection", lambda *_: made)
    return made


@pytest.fixture
def plain(synchronizer: Synchronizer) -> ExplorerClient:
    return ExplorerClient(None, "e", 20.0, Source())


def test_an_unawaited_coroutine_is_not_taken_for_a_load(
    synchronizer: Synchronizer, plain: ExplorerClient
) -> None:
    synchronizer.newest = 1
    with pytest.raises(TypeError, match=r"AsyncEngine takes .*; expected AsyncExplorerClient"):
        plain.update(AsyncEngine(), 0)
    hidden = SimpleNamespace(
        begin_update=lambda version: None, load_weights=lambda w: AsyncEngine().load_weights(w)
    )
    with pytest.raises(TypeError, match="expected AsyncExplorerClient"):
        plain.update(hidden, 0)
    assert plain.torn
    assert synchronizer.told == [("refuse", 1)]


async def nothing(*_: object) -> None:
    """An engine's coroutine that is never awaited."""


@pytest.mark.parametrize("method", ["begin_update", "load_weights", "keep_weights"])
def test_an_engine_with_one_coroutine_function_is_refused(
    method: str, synchronizer: Synchronizer, plain: ExplorerClient
) -> None:
    synchronizer.newest = 1
    engine = KeepingEngine()
    setattr(engine, method, nothing)
    with pytest.raises(TypeError, match="expected AsyncExplorerClient"):
        plain.update(engine, 0)
    hidden = KeepingEngine()
    setattr(hidden, method, lambda *arguments: nothing())
    if method != "keep_weights":  # which is not called: these weights may not be kept
        with pytest.raises(TypeError, match="expected AsyncExplorerClient"):
            plain.update(hidden, 0)


def test_an_engine_that_keeps_weights_keeps_them_when_it_is_awaited_too(
    synchronizer: Synchronizer,
) -> None:
    source, engine = Source(keepable=True), KeepingEngine()
    client = AsyncExplorerClient(ExplorerClient(None, "e", 20.0, source))
    synchronizer.newest = 1
    assert asyncio.run(client.update(engine, 0)) == 1
    assert engine.kept == ["w", "b"]
    assert engine.loaded == []
    assert source.keeps == 1
    assert synchronizer.told == [("acknowledge", 1)]


@pytest.mark.parametrize("made", [AsyncEngine, PlainEngine])
def test_a_load_is_awaited_before_it_is_acknowledged_and_the_loop_goes_on_meanwhile(
    made: type[Any], synchronizer: Synchronizer, plain: ExplorerClient
) -> None:
    async def run() -> None:
        client, engine, ticks = AsyncExplorerClient(plain), made(), 0
        waiting = asyncio.create_task(client.update(engine, 0))
        while not waiting.done():
            await asyncio.sleep(0.005)
            ticks += 1
            if ticks == 10:
                assert synchronizer.told == []
                synchronizer.newest = 3
        assert await waiting == 3
        assert engine.loaded == ["w", "b"]
        assert synchronizer.told == [("acknowledge", 3)]
        assert ticks > 10
        with pytest.raises(WeightsTimeoutError):
            await client.update(engine, 3, timeout=0.05)

    asyncio.run(run())


def test_an_engine_that_fails_or_is_interrupted_amid_a_load_is_torn_until_one_succeeds(
    synchronizer: Synchronizer, plain: ExplorerClient
) -> None:
    async def run() -> None:
        client, engine = AsyncExplorerClient(plain), AsyncEngine()
        synchronizer.newest, engine.failure = 1, MemoryError("no memory")
        with pytest.raises(MemoryError):
            await client.update(engine, 0)
        assert client.torn
        assert synchronizer.told == [("refuse", 1)]
        engine.failure, engine.hangs = None, True
        engine.loading.clear()
        loading = asyncio.create_task(client.update(engine, 0))
        await engine.loading.wait()
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        assert client.torn
        engine.hangs = False
        assert await client.update(engine, 0) == 1
        assert not client.torn
        assert synchronizer.told[-1] == ("acknowledge", 1)

    asyncio.run(run())


def test_a_wait_that_is_cancelled_gives_way_to_the_next_call(
    synchronizer: Synchronizer, plain: ExplorerClient
) -> None:
    async def run() -> float:
        client, engine = AsyncExplorerClient(plain), AsyncEngine()
        waiting = asyncio.create_task(client.update(engine, 0))
        await asyncio.sleep(0.05)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        started = time.monotonic()
        await client.leave()
        return time.monotonic() - started

    assert asyncio.run(run()) < 5
