"""verl's own manager drives our backend; its Ray workers, which want GPUs, are threads here."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch

pytest.importorskip("verl", reason="the extra `verl` is not installed")

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(180)]

SECONDS = 60.0
BUCKET = 1 << 20


def weights(step: int) -> Iterator[tuple[str, torch.Tensor]]:
    for number in range(8):
        yield f"w{number}", torch.full((50_000,), float(10 * step + number))


def expected(step: int) -> dict[str, float]:
    return {f"w{number}": float(10 * step + number) for number in range(8)}


class Workers:
    """Stands for a RayWorkerGroup: one engine a worker, calls in threads."""

    def __init__(self, engines: list[Any]) -> None:
        self.engines = engines
        self.world_size = len(engines)
        self.got: list[dict[str, float]] = []
        self._pool = ThreadPoolExecutor(self.world_size)

    def execute_checkpoint_engine(self, method: list[str], **arguments: list[Any]) -> list[Any]:
        return [
            getattr(engine, method[rank])(**{name: all_[rank] for name, all_ in arguments.items()})
            for rank, engine in enumerate(self.engines)
        ]

    def update_weights(self, global_steps: int, mode: str | None = None) -> list[Future[Any]]:
        work = self._receive if mode is None else self._send
        return [self._pool.submit(work, engine, global_steps) for engine in self.engines]

    def _send(self, engine: Any, step: int) -> Any:
        return asyncio.run(engine.send_weights(weights(step), global_steps=step))

    def _receive(self, engine: Any, step: int) -> None:
        async def take() -> dict[str, float]:
            items = engine.receive_weights(global_steps=step)
            return {name: float(tensor[-1]) async for name, tensor in items}

        self.got.append(asyncio.run(take()))


class Replica:
    """Replaces a replica with its HTTP server; records the calls."""

    def __init__(self, worker: Any) -> None:
        self.workers = [worker]
        self.told: list[str] = []

    def __getattr__(self, name: str) -> Any:
        async def call(**arguments: Any) -> None:
            self.told.append(name)

        return call


def got(value: Any) -> Any:
    """Stands for ``ray.get``."""
    if isinstance(value, list):
        return [got(one) for one in value]
    return value.result(SECONDS) if isinstance(value, Future) else value


class Stage:
    """Two trainer ranks and two rollouts, with verl's manager."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from verl.checkpoint_engine import CheckpointEngineManager, CheckpointEngineRegistry
        from verl.checkpoint_engine import base as verl_base
        from verl.workers.config import CheckpointEngineConfig

        config = CheckpointEngineConfig(
            backend="trainsync", custom_backend_module="trainsync.integrations.verl.backend"
        )
        self.rollouts: list[Workers] = []

        def rollout_group(worker_handles: list[Any], **_: Any) -> Workers:
            self.rollouts.append(Workers(worker_handles))
            return self.rollouts[-1]

        monkeypatch.setattr(verl_base, "RayWorkerGroup", rollout_group)
        monkeypatch.setattr(verl_base.ray, "get", got)
        options = {"timeout_seconds": 30, "host": "127.0.0.1", "same_host": False}

        def engine(**role: bool) -> Any:
            return CheckpointEngineRegistry.new("trainsync", bucket_size=BUCKET, **role, **options)

        self.manager = CheckpointEngineManager(config, None, [])  # imports the backend
        self.actors = Workers([engine(is_master=True), engine(is_master=False)])
        self.manager.actor_wg = self.manager.trainer = self.actors  # 0.8 calls it the trainer
        self.replicas = [Replica(engine()) for _ in range(2)]
        self.manager.add_replicas(self.replicas)

    def close(self) -> None:
        for engine in (*self.actors.engines, *[r.workers[0] for r in self.replicas]):
            for part in (engine._sender, engine._receiver):
                if part is not None:
                    part.close()


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    stage = Stage(monkeypatch)
    yield stage
    stage.close()


def test_verls_manager_brings_weights_to_every_rollout_and_goes_on_after_an_error(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (0, 1, 1):  # verl's own step may come twice
        stage.manager.update_weights(step)
        assert stage.rollouts[-1].got == [expected(step)] * 2
    assert stage.replicas[0].told[-2:] == ["resume_kv_cache", "resume_generation"]

    def failing(self: Workers, engine: Any, step: int) -> None:
        def broken() -> Iterator[tuple[str, torch.Tensor]]:
            yield from weights(step)
            raise RuntimeError("a trainer rank died")

        asyncio.run(engine.send_weights(broken(), global_steps=step))

    with monkeypatch.context() as patched:
        patched.setattr(Workers, "_send", failing)
        with pytest.raises(Exception, match="a trainer rank died"):
            stage.manager.update_weights(2)

    stage.manager.update_weights(3)
    assert stage.rollouts[-1].got == [expected(3)] * 2
    stage.manager.remove_replicas(stage.replicas[1:])
    stage.manager.update_weights(4)
    assert stage.rollouts[-1].got == [expected(4)]


def test_a_worker_that_was_not_prepared_says_so(stage: Stage) -> None:
    with pytest.raises(Exception, match="send_weights was called before init_process_group"):
        got(stage.actors.update_weights(1, mode="trainsync"))


def test_a_topology_without_a_master_is_refused(stage: Stage) -> None:
    kind = type(stage.actors.engines[0])
    with pytest.raises(ValueError, match="the first of them that of the trainer rank"):
        kind.build_topology(1, 1, [{"name": "a", "version": -1}, {"name": "b", "version": -1}])
