"""vLLM's workers, synchronous and asynchronous, get every weight."""

import asyncio
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from trainsync.engines.errors import EngineUpdateError
from trainsync.engines.inference.base import InferenceEngine
from trainsync.engines.inference.vllm import (
    WORKER_EXTENSION,
    AsyncVLLMEngine,
    VLLMEngine,
    WorkerExtension,
)

from tests.unit.engines.inference.tensors import Named, every_kind, raw


class FakeModel:
    """As a model of vLLM: ``load_weights`` of names and full tensors."""

    def __init__(self, log: list[str]) -> None:
        self.loaded: Named = []
        self._log = log

    def load_weights(self, weights: Any) -> set[str]:
        self._log.append("load")
        named = list(weights)
        self.loaded += named
        return {name for name, _ in named}


class FakeLLM:
    """``vllm.LLM`` with two workers, as far as the adapter goes."""

    def __init__(self, log: list[str]) -> None:
        self.log = log
        self.reset = True
        self.workers = []
        for _ in range(2):
            worker = WorkerExtension()
            worker.device = torch.device("cpu")
            worker.model_runner = SimpleNamespace(model=FakeModel(log), model_config="config")
            self.workers.append(worker)

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        assert timeout == 5.0
        return [getattr(worker, method)(*args, **(kwargs or {})) for worker in self.workers]

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        self.log.append("reset")
        return self.reset


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What happens, in order; with the module of vLLM that the extension imports."""
    happened: list[str] = []
    utils = ModuleType("vllm.model_executor.model_loader.utils")

    def process_weights_after_loading(model: Any, model_config: Any, device: Any) -> None:
        assert (model_config, device) == ("config", torch.device("cpu"))
        happened.append("process")

    utils.process_weights_after_loading = process_weights_after_loading  # type: ignore[attr-defined]
    path = ""
    for name in utils.__name__.split("."):
        path = f"{path}.{name}".lstrip(".")
        monkeypatch.setitem(sys.modules, path, ModuleType(path))
    monkeypatch.setitem(sys.modules, utils.__name__, utils)
    yield happened


def test_every_worker_of_vllm_loads_every_weight_and_forgets_the_old_prefixes(
    log: list[str],
) -> None:
    llm = FakeLLM(log)
    engine: InferenceEngine = VLLMEngine(llm, bucket_size=100, timeout=5.0)
    engine.begin_update(4)
    assert engine.load_weights(iter(every_kind())) == 6
    for worker in llm.workers:
        assert raw(worker.model_runner.model.loaded) == raw(every_kind())
    assert log == ["load"] * 4 + ["process"] * 2 + ["reset"]


def test_a_prefix_cache_that_vllm_keeps_is_told_of(log: list[str]) -> None:
    llm = FakeLLM(log)
    llm.reset = False
    engine = VLLMEngine(llm, timeout=5.0)
    engine.begin_update(4)
    with pytest.raises(EngineUpdateError, match="version 4 is loaded, but vLLM's prefix cache"):
        engine.load_weights(every_kind())


class AsyncLLM(FakeLLM):
    """``AsyncLLM``: the same methods, as coroutines."""

    async def collective_rpc(self, *given: Any, **named: Any) -> list[Any]:  # type: ignore[override]
        return super().collective_rpc(*given, **named)

    async def reset_prefix_cache(self) -> bool:  # type: ignore[override]
        return super().reset_prefix_cache()


async def take(engine: AsyncVLLMEngine, version: int) -> int:
    engine.begin_update(version)
    return await engine.load_weights(iter(every_kind()))


def test_every_worker_of_an_asynchronous_vllm_loads_every_weight(log: list[str]) -> None:
    llm = AsyncLLM(log)
    assert asyncio.run(take(AsyncVLLMEngine(llm, bucket_size=100, timeout=5.0), 4)) == 6
    for worker in llm.workers:
        assert raw(worker.model_runner.model.loaded) == raw(every_kind())
    assert log == ["load"] * 4 + ["process"] * 2 + ["reset"]
    llm.reset = False
    with pytest.raises(EngineUpdateError, match="vLLM's prefix cache"):
        asyncio.run(take(AsyncVLLMEngine(llm, timeout=5.0), 5))


def test_an_asynchronous_vllm_is_refused_by_a_synchronous_client(log: list[str]) -> None:
    with pytest.raises(TypeError, match="AsyncLLM answers with coroutines; expected AsyncVLLM"):
        VLLMEngine(AsyncLLM(log))  # type: ignore[arg-type]
    hidden = SimpleNamespace(
        collective_rpc=lambda *a, **k: AsyncLLM(log).collective_rpc(*a, **k),
        reset_prefix_cache=lambda: True,
    )
    engine = VLLMEngine(hidden, timeout=5.0)
    engine.begin_update(4)
    told = "version 4 is not loaded: trainsync_load_weights returned coroutine to be awaited"
    with pytest.raises(EngineUpdateError, match=told):
        engine.load_weights(every_kind())
    assert log == []


@pytest.mark.parametrize(
    ("answers", "told"),
    [
        (None, "answered trainsync_load_weights with None, expected a list"),
        ([], "answered trainsync_load_weights with \\[\\], expected a list"),
        ([6, None], "worker 1 of vLLM answered trainsync_load_weights with None, expected 6"),
    ],
)
def test_what_vllm_answers_is_not_taken_for_success_unless_every_worker_says_so(
    answers: Any, told: str, log: list[str]
) -> None:
    llm = FakeLLM(log)
    llm.collective_rpc = lambda *a, **k: answers  # type: ignore[method-assign]
    engine = VLLMEngine(llm)
    engine.begin_update(4)
    with pytest.raises(EngineUpdateError, match=f"version 4 is not loaded: .*{told}"):
        engine.load_weights(every_kind())


def test_the_worker_extension_is_found_by_its_name() -> None:
    module, _, name = WORKER_EXTENSION.rpartition(".")
    assert getattr(sys.modules[module], name) is WorkerExtension
