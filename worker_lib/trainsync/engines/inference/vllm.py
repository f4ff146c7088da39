"""Load new weights into vLLM through ``collective_rpc`` and a worker extension.

Written after vLLM's source and tested with an engine of the same signatures only: vLLM does not run
on a CPU of this project's machines.
"""

import asyncio
from typing import Any, Final, Protocol

import torch

from trainsync.engines.errors import EngineUpdateError
from trainsync.engines.inference.base import NamedTensors, in_buckets, refuse_awaitable
from trainsync.weights.explorer.loading import is_asynchronous

WORKER_EXTENSION: Final = "trainsync.engines.inference.vllm.WorkerExtension"
"""Make vLLM with this: ``LLM(..., worker_extension_cls=WORKER_EXTENSION)``."""

# (name, dtype, shape, bytes): built-in types, which vLLM sends to its workers without pickling.
Row = tuple[str, str, list[int], bytes]


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

    async def reset_prefix_cache(self) -> bool | None:
        """Drop cached results of older weights; False if requests still use them."""
        ...


class VLLMEngine:
    """A ``vllm.LLM`` that was made with `WORKER_EXTENSION`.

    Every worker gets all weights and loads its share, whatever the parallelism; vLLM handles fused
    and tied weights. No LoRA adapters, and no weights that vLLM quantises while it loads.

    Args:
        bucket_size: bytes of weights in one call of the workers.
        timeout: limit in seconds for one call of the workers.

    Raises:
        TypeError: the engine is an ``AsyncLLM``; use `AsyncVLLMEngine`.
    """

    def __init__(self, llm: LLM, *, bucket_size: int = 256 << 20, timeout: float = 600.0) -> None:
        if is_asynchronous(llm.collective_rpc):
            raise TypeError(
                f"{type(llm).__name__} answers with coroutines; expected "
                "AsyncVLLMEngine and AsyncExplorerClient"
            )
        self._llm = llm
        self._bucket_size = bucket_size
        self._timeout = timeout
        self._coming = -1

    def begin_update(self, version: int) -> None:
        """See `InferenceEngine`."""
        self._coming = version

    def load_weights(self, weights: NamedTensors) -> int:
        """See `InferenceEngine`. Returns the number of weights sent.

        Raises:
            EngineUpdateError: a worker did not confirm the weights it was sent, or the prefix cache
                could not be emptied because requests still run.
            Exception: raised by vLLM; ``TimeoutError`` after ``timeout`` seconds.
        """
        count = 0
        for bucket in in_buckets(weights, self._bucket_size):
            rows = [_row(*named) for named in bucket]
            self._call("trainsync_load_weights", len(rows), rows)
            count += len(bucket)
        self._call("trainsync_finish_loading", True)
        _check_reset(self._coming, self._llm.reset_prefix_cache())
        return count

    def _call(self, method: str, expected: object, *arguments: Any) -> None:
        answers = self._llm.collective_rpc(method, timeout=self._timeout, args=arguments)
        _check_answers(self._coming, method, answers, expected)


class AsyncVLLMEngine:
    """A ``vllm.v1.engine.async_llm.AsyncLLM`` that was made with `WORKER_EXTENSION`.

    For `AsyncExplorerClient`; otherwise like `VLLMEngine`. A thread reads and packs the tensors.
    """

    def __init__(
        self, llm: AsyncLLM, *, bucket_size: int = 256 << 20, timeout: float = 600.0
    ) -> None:
        self._llm = llm
        self._bucket_size = bucket_size
        self._timeout = timeout
        self._coming = -1

    def begin_update(self, version: int) -> None:
        """See `InferenceEngine`."""
        self._coming = version

    async def load_weights(self, weights: NamedTensors) -> int:
        """See `VLLMEngine.load_weights`."""
        count = 0
        buckets = in_buckets(weights, self._bucket_size)
        while rows := await asyncio.to_thread(lambda: [_row(*n) for n in next(buckets, [])]):
            await self._call("trainsync_load_weights", len(rows), rows)
            count += len(rows)
        await self._call("trainsync_finish_loading", True)
        _check_reset(self._coming, await self._llm.reset_prefix_cache())
        return count

    async def _call(self, method: str, expected: object, *arguments: Any) -> None:
        answers = await self._llm.collective_rpc(method, timeout=self._timeout, args=arguments)
        _check_answers(self._coming, method, answers, expected)


def _check_answers(version: int, method: str, answers: object, expected: object) -> None:
    """Check that every worker confirmed the call; a coroutine as an answer means that nothing ran.

    Raises:
        EngineUpdateError: a worker did not confirm.
    """
    refuse_awaitable(version, method, answers)
    if not isinstance(answers, list | tuple) or not answers:
        raise EngineUpdateError(
            f"version {version} is not loaded: vLLM answered {method} with {answers!r}, expected a "
            "list with the answer of each worker"
        )
    for worker, answer in enumerate(answers):
        if answer != expected:
            raise EngineUpdateError(
                f"version {version} is not loaded: worker {worker} of vLLM answered {method} with "
                f"{answer!r}, expected {expected!r}"
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


class WorkerExtension:
    """Methods that vLLM adds to its workers; see `WORKER_EXTENSION`."""

    model_runner: Any
    device: Any

    def trainsync_load_weights(self, rows: list[Row]) -> int:
        """Load some of a version's weights. Returns their number."""
        self.model_runner.model.load_weights([_tensor(*row) for row in rows])
        return len(rows)

    def trainsync_finish_loading(self) -> bool:
        """After the last weights: let layers recompute values derived from them. Returns True."""
        from vllm.model_executor.model_loader.utils import (  # type: ignore[import-not-found]
            process_weights_after_loading,
        )

        runner = self.model_runner
        process_weights_after_loading(runner.model, runner.model_config, self.device)
        return True


def _row(name: str, tensor: torch.Tensor) -> Row:
    raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()
    dtype = str(tensor.dtype).removeprefix("torch.")
    return name, dtype, list(tensor.shape), raw.numpy().tobytes()


def _tensor(name: str, dtype: str, shape: list[int], raw: bytes) -> tuple[str, torch.Tensor]:
    data = torch.empty(len(raw), dtype=torch.uint8)
    data.numpy()[:] = memoryview(raw)
    return name, data.view(getattr(torch, dtype)).reshape(shape)
