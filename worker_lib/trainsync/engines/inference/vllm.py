"""Load new weights into a vLLM of this host, through shared memory and vLLM's weight transfer."""

import asyncio
from collections.abc import ItemsView, Sequence
from pathlib import Path
from typing import Any, Protocol

from trainsync.engines.errors import EngineUpdateError
from trainsync.engines.inference.base import NamedTensors, refuse_awaitable
from trainsync.engines.servers.sessions import session_of
from trainsync.weights.explorer.engine_calls import is_asynchronous
from trainsync.weights.staging.area import StagingArea
from trainsync.weights.staging.index import StagedReference
from trainsync.weights.transports.shared_memory.segment import SHARED_MEMORY

_Call = tuple[str, dict[str, Any]]


class LLM(Protocol):
    """The methods of ``vllm.LLM`` that the adapter calls."""

    def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every worker."""
        ...

    def update_weight_version(self, new_version: str) -> None:
        """Name the version that is loaded."""
        ...

    def reset_prefix_cache(self) -> bool | None:
        """Drop cached results of older weights; False if requests still use them."""
        ...


class AsyncLLM(Protocol):
    """The methods of ``AsyncLLM`` that the adapter calls."""

    async def collective_rpc(
        self,
        method: str,
        timeout: float | None = None,  # noqa: ASYNC109 - as vLLM has it
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Call a method of every worker."""
        ...

    async def update_weight_version(self, new_version: str) -> None:
        """Name the version that is loaded."""
        ...

    async def reset_prefix_cache(self) -> bool | None:
        """Drop cached results of older weights; False if requests still use them."""
        ...


class VLLMEngine:
    """A ``vllm.LLM`` made with ``weight_transfer_config={"backend": "trainsync"}``.

    A version is copied to shared memory once, and each worker loads its share from there, in any
    parallelism; vLLM handles fused, tied and quantised weights. No LoRA adapters, and no
    workers on other hosts.

    Args:
        timeout: limit in seconds for one call of the workers.
        memory: the memory file system; the workers' environment names another one than the default
            as ``TRAINSYNC_STAGING_MEMORY``.

    Raises:
        TypeError: the engine is an ``AsyncLLM``; use `AsyncVLLMEngine`.
    """

    def __init__(self, llm: LLM, *, timeout: float = 600.0, memory: Path = SHARED_MEMORY) -> None:
        if is_asynchronous(llm.collective_rpc):
            raise TypeError(
                f"{type(llm).__name__} answers with coroutines; expected "
                "AsyncVLLMEngine and AsyncExplorerClient"
            )
        self._llm = llm
        self._timeout = timeout
        self._staging = _Staging(memory)
        self._coming = -1

    def begin_update(self, version: int) -> None:
        """See `InferenceEngine`."""
        self._coming = version

    def load_weights(self, weights: NamedTensors) -> int:
        """See `InferenceEngine`. Returns the number of weights.

        Raises:
            WeightsError: they could not be laid into shared memory; vLLM has its old weights.
            EngineUpdateError: a worker did not confirm, or the prefix cache could not be emptied
                because requests still run.
            Exception: raised by vLLM; ``TimeoutError`` after ``timeout`` seconds.
        """
        count, reference = self._staging.stage(self._coming, weights)
        for method, arguments in _calls(reference):
            answers = self._llm.collective_rpc(method, timeout=self._timeout, kwargs=arguments)
            _check_answers(self._coming, method, answers)
        _check_reset(self._coming, self._llm.reset_prefix_cache())
        self._llm.update_weight_version(str(self._coming))
        return count

    def close(self) -> None:
        """Give back the shared memory; vLLM keeps its weights."""
        self._staging.close()


class AsyncVLLMEngine:
    """A ``vllm.v1.engine.async_llm.AsyncLLM``; for `AsyncExplorerClient`, otherwise as
    `VLLMEngine`. A thread lays the tensors into shared memory.
    """

    def __init__(
        self, llm: AsyncLLM, *, timeout: float = 600.0, memory: Path = SHARED_MEMORY
    ) -> None:
        self._llm = llm
        self._timeout = timeout
        self._staging = _Staging(memory)
        self._coming = -1

    def begin_update(self, version: int) -> None:
        """See `InferenceEngine`."""
        self._coming = version

    async def load_weights(self, weights: NamedTensors) -> int:
        """See `VLLMEngine.load_weights`."""
        count, reference = await asyncio.to_thread(self._staging.stage, self._coming, weights)
        for method, arguments in _calls(reference):
            answers = await self._llm.collective_rpc(
                method, timeout=self._timeout, kwargs=arguments
            )
            _check_answers(self._coming, method, answers)
        _check_reset(self._coming, await self._llm.reset_prefix_cache())
        await self._llm.update_weight_version(str(self._coming))
        return count

    def close(self) -> None:
        """See `VLLMEngine.close`."""
        self._staging.close()


class _Staging:
    """The area, from the first version on."""

    def __init__(self, memory: Path) -> None:
        self._memory = memory
        self._area: StagingArea | None = None

    def stage(self, version: int, weights: NamedTensors) -> tuple[int, StagedReference]:
        if self._area is None:
            self._area = StagingArea(self._memory)
        # Weights that come once are held until all sizes are known.
        named = dict(weights if isinstance(weights, ItemsView | Sequence) else list(weights))
        return len(named), self._area.stage(version, named)

    def close(self) -> None:
        if self._area is not None:
            self._area.close()
            self._area = None


def _calls(reference: StagedReference) -> list[_Call]:
    """The workers' methods of an update, as vLLM's own servers call them."""
    told = reference.as_dict()
    return [
        ("init_weight_transfer_engine", {"init_info": told}),
        (session_of(reference), {}),
        ("update_weights", {"update_info": told}),
        ("finish_weight_update", {}),
    ]


def _check_answers(version: int, method: str, answers: object) -> None:
    """Check that the workers were called; a coroutine as an answer means that nothing ran.

    Raises:
        EngineUpdateError: they were not.
    """
    refuse_awaitable(version, method, answers)
    if not isinstance(answers, list | tuple) or not answers:
        raise EngineUpdateError(
            f"version {version} is not loaded: vLLM answered {method} with {answers!r}, expected a "
            "list with the answer of each worker"
        )


def _check_reset(version: int, answer: object) -> None:
    """Check that the prefix cache was emptied: older versions of vLLM return None, newer ones True.

    Raises:
        EngineUpdateError: any other answer.
    """
    refuse_awaitable(version, "reset_prefix_cache", answer)
    if answer is False:
        raise EngineUpdateError(
            f"version {version} is loaded, but vLLM's prefix cache still holds what older "
            "weights computed: requests were running"
        )
    if answer not in (True, None):
        raise EngineUpdateError(
            f"version {version} is loaded, but vLLM answered reset_prefix_cache with {answer!r}, "
            "expected True"
        )
