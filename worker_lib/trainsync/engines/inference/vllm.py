"""New weights into vLLM, by the entry points that it offers for that.

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
"""What vLLM must be made with: ``LLM(..., worker_extension_cls=WORKER_EXTENSION)``."""

# name, dtype, shape, bytes: plain data, which vLLM sends to its workers without pickling.
Row = tuple[str, str, list[int], bytes]


class LLM(Protocol):
    """What is needed of ``vllm.LLM``."""

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
        """Forget what was computed with older weights; False if that could not be."""
        ...


class AsyncLLM(Protocol):
    """What is needed of ``AsyncLLM``."""

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
        """Forget what was computed with older weights; False if that could not be."""
        ...


class VLLMEngine:
    """A ``vllm.LLM`` that was made with `WORKER_EXTENSION`.

    Every worker gets all weights and takes its share, whatever the parallelism; fused and tied ones
    are vLLM's business. No LoRA adapters, and no weights that vLLM quantises while it loads.

    Args:
        bucket_size: bytes that are sent to the workers at once.
        timeout: seconds of one call of the workers.

    Raises:
        TypeError: it is an ``AsyncLLM``; expected `AsyncVLLMEngine`.
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
        """See `InferenceEngine`; how many weights were sent.

        Raises:
            EngineUpdateError: a worker did not say that it loaded what it was sent, or the prefix
                cache could not be emptied, since requests still run.
            Whatever vLLM raises; ``TimeoutError`` after ``timeout`` seconds.
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

    For `AsyncExplorerClient`; otherwise as `VLLMEngine`. Tensors are read and packed in a thread.
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
    """Every worker has said that it did as it was told; a coroutine has done nothing yet.

    Raises:
        EngineUpdateError: they have not.
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
    """The prefix cache is empty: older versions of vLLM say nothing, newer ones True.

    Raises:
        EngineUpdateError: it is not, or nobody knows.
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
        """Load some of a version's weights; how many."""
        self.model_runner.model.load_weights([_tensor(*row) for row in rows])
        return len(rows)

    def trainsync_finish_loading(self) -> bool:
        """After the last of them: let layers derive what they compute from their weights. True."""
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
