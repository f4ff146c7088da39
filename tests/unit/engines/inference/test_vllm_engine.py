"""vLLM's workers, synchronous and asynchronous, are led to every weight."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from trainsync.engines.errors import EngineUpdateError
from trainsync.engines.inference.base import InferenceEngine
from trainsync.engines.inference.vllm import AsyncVLLMEngine, VLLMEngine
from trainsync.weights.staging.index import StagedReference
from trainsync.weights.staging.reading import StagedReader

from tests.unit.engines.inference.tensors import Named, every_kind, raw

_CALLS = [
    "init_weight_transfer_engine",
    "start_weight_update",
    "update_weights",
    "finish_weight_update",
]


class FakeLLM:
    """``vllm.LLM`` with two workers, as far as the adapter goes."""

    def __init__(self, memory: Path) -> None:
        self.log: list[str] = []
        self.loaded: Named = []
        self.version = "default"
        self.reset = True
        self._memory = memory

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        assert timeout == 5.0
        self.log.append(method)
        for told in (kwargs or {}).values():
            staged = StagedReader(self._memory).open(StagedReference(**told))
            self.loaded = [(name, tensor.clone()) for name, tensor in staged.tensors.items()]
        return [None, None]

    def update_weight_version(self, new_version: str) -> None:
        self.version = new_version

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        self.log.append("reset")
        return self.reset


class AsyncLLM(FakeLLM):
    """``AsyncLLM``: the same methods, as coroutines."""

    async def collective_rpc(self, *given: Any, **named: Any) -> list[Any]:  # type: ignore[override]
        return super().collective_rpc(*given, **named)

    async def update_weight_version(self, new_version: str) -> None:  # type: ignore[override]
        super().update_weight_version(new_version)

    async def reset_prefix_cache(self) -> bool:  # type: ignore[override]
        return super().reset_prefix_cache()


def test_vllm_is_led_to_every_weight_and_forgets_the_old_prefixes(tmp_path: Path) -> None:
    llm = FakeLLM(tmp_path)
    engine = VLLMEngine(llm, timeout=5.0, memory=tmp_path)
    taken: InferenceEngine = engine
    for version in (4, 5):
        taken.begin_update(version)
        assert taken.load_weights(iter(every_kind())) == 6
        assert raw(llm.loaded) == raw(every_kind())
        assert llm.version == str(version)
    assert llm.log == [*_CALLS, "reset"] * 2
    engine.close()
    assert not list(tmp_path.iterdir())


def test_a_draft_model_comes_in_vllms_update_for_drafts(tmp_path: Path) -> None:
    llm = FakeLLM(tmp_path)
    engine = VLLMEngine(llm, timeout=5.0, memory=tmp_path)
    engine.begin_update(4)
    weights = [*every_kind(), *((f"draft.{name}", tensor) for name, tensor in every_kind())]
    assert engine.load_weights(weights) == 12
    assert raw(llm.loaded) == raw(weights)
    assert llm.log[1] == "start_draft_weight_update"
    assert "start_weight_update" not in llm.log
    engine.close()


def test_a_prefix_cache_that_vllm_keeps_is_told_of(tmp_path: Path) -> None:
    llm = FakeLLM(tmp_path)
    llm.reset = False
    engine = VLLMEngine(llm, timeout=5.0, memory=tmp_path)
    engine.begin_update(4)
    with pytest.raises(EngineUpdateError, match="version 4 is loaded, but vLLM's prefix cache"):
        engine.load_weights(every_kind())
    assert llm.version == "default"


async def take(engine: AsyncVLLMEngine, version: int) -> int:
    engine.begin_update(version)
    return await engine.load_weights(dict(every_kind()).items())


def test_an_asynchronous_vllm_is_led_to_every_weight(tmp_path: Path) -> None:
    llm = AsyncLLM(tmp_path)
    engine = AsyncVLLMEngine(llm, timeout=5.0, memory=tmp_path)
    assert asyncio.run(take(engine, 4)) == 6
    assert raw(llm.loaded) == raw(every_kind())
    assert (llm.version, llm.log) == ("4", [*_CALLS, "reset"])
    llm.reset = False
    with pytest.raises(EngineUpdateError, match="vLLM's prefix cache"):
        asyncio.run(take(engine, 5))
    engine.close()
    assert not list(tmp_path.iterdir())


def test_an_asynchronous_vllm_is_refused_by_a_synchronous_client(tmp_path: Path) -> None:
    llm = AsyncLLM(tmp_path)
    with pytest.raises(TypeError, match="AsyncLLM answers with coroutines; expected AsyncVLLM"):
        VLLMEngine(llm)  # type: ignore[arg-type]
    hidden: Any = SimpleNamespace(collective_rpc=lambda *a, **k: llm.collective_rpc(*a, **k))
    engine = VLLMEngine(hidden, timeout=5.0, memory=tmp_path)
    engine.begin_update(4)
    told = "version 4 is not loaded: init_weight_transfer_engine returned coroutine to be awaited"
    with pytest.raises(EngineUpdateError, match=told):
        engine.load_weights(every_kind())
    assert llm.log == []


@pytest.mark.parametrize("answers", [None, []])
def test_an_answer_of_no_worker_is_not_taken_for_success(answers: Any, tmp_path: Path) -> None:
    llm = FakeLLM(tmp_path)
    llm.collective_rpc = lambda *a, **k: answers  # type: ignore[method-assign]
    engine = VLLMEngine(llm, memory=tmp_path)
    engine.begin_update(4)
    with pytest.raises(EngineUpdateError, match=r"version 4 is not loaded: .* expected a list"):
        engine.load_weights(every_kind())
