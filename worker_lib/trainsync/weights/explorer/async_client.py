"""The explorer's side for asyncio: its waits and loads leave the event loop free."""

import asyncio
import contextlib
import inspect
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeVar

from trainsync.weights import threads
from trainsync.weights.errors import WeightsTimeoutError
from trainsync.weights.explorer.client import ExplorerClient
from trainsync.weights.explorer.engine_calls import is_asynchronous, keeps
from trainsync.weights.transports.base import LoadsWeights, Weights

T = TypeVar("T")

# Of one question: a thread whose task was cancelled ends after it.
_LOOK_SECONDS: Final = 1.0


class AsyncExplorerClient:
    """An `ExplorerClient` whose calls are awaited.

        client = AsyncExplorerClient(await asyncio.to_thread(ctx.explorer, "explorer-0"))
        while (version := await client.update(engine, version)) is not None:
            ...

    One task at a time. A task may be cancelled: the wait ends within a second behind it, and a
    fetch with its own deadline; an engine that was being loaded is `torn` then.

    Args:
        client: not to be used otherwise from now on.
    """

    def __init__(self, client: ExplorerClient) -> None:
        self._client = client
        self._order = threading.Lock()  # the client is for one thread

    @property
    def torn(self) -> bool:
        """See `ExplorerClient`."""
        return self._client.torn

    async def wait_and_fetch(
        self,
        current_version: int,
        timeout: float | None = None,  # noqa: ASYNC109 - the same as of ExplorerClient
    ) -> Weights | None:
        """See `ExplorerClient.wait_and_fetch`."""
        limit = self._client.timeout if timeout is None else timeout
        deadline = time.monotonic() + limit
        while True:
            left = deadline - time.monotonic()
            try:
                seconds = max(0.0, min(_LOOK_SECONDS, left))
                restarts, newest = self._client.newest(current_version)
                version = await self._run(
                    partial(self._client.wait, newest, seconds, restarts=restarts)
                )
            except WeightsTimeoutError:
                if left > _LOOK_SECONDS:
                    continue
                raise
            if version is None:
                return None
            left = max(0.0, deadline - time.monotonic())
            return await self._run(self._client.wait_and_fetch, current_version, left)

    async def update(
        self,
        engine: LoadsWeights,
        current_version: int,
        timeout: float | None = None,  # noqa: ASYNC109 - the same as of ExplorerClient
    ) -> int | None:
        """See `ExplorerClient.update`.

        Args:
            engine: its methods may be coroutines, which run in the event loop; others are called
                in a thread.
        """
        weights = await self.wait_and_fetch(current_version, timeout)
        if weights is None:
            return None
        try:
            await self._give(engine.begin_update, weights.version)
            if keeps(engine, weights):
                await self._give(engine.keep_weights, weights.state_dict.items())
                await self._run(self._client.note_kept)
            else:
                await self._give(engine.load_weights, weights.state_dict.items())
        except asyncio.CancelledError as error:
            self._client.torn = True
            self._start(
                self._client.note_failed, weights.version, error
            )  # behind a load in a thread
            raise
        except BaseException as error:
            await self._run(self._client.note_failed, weights.version, error)
            raise
        await self._run(self._client.note_loaded, weights)
        return weights.version

    async def acknowledge(self, weights: Weights) -> None:
        """See `ExplorerClient.acknowledge`."""
        await self._run(self._client.acknowledge, weights)

    async def report(self, version: int, cause: str, *, retries: bool = False) -> None:
        """See `ExplorerClient.report`."""
        await self._run(lambda: self._client.report(version, cause, retries=retries))

    async def leave(self) -> None:
        """See `ExplorerClient.leave`."""
        await self._run(self._client.leave)

    async def _give(self, method: Callable[..., object], argument: object) -> None:
        if is_asynchronous(method):
            answer = method(argument)
        else:
            answer = await self._run(method, argument)
        if inspect.isawaitable(answer):
            await answer

    async def _run(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call it in a thread, which does not keep a process alive that ends."""
        return await self._start(function, *arguments)

    def _start(self, function: Callable[..., T], *arguments: Any) -> "asyncio.Future[T]":
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def settle(act: Callable[[Any], None], value: Any) -> None:
            if not future.done():  # else the task was cancelled
                act(value)

        def work() -> None:
            outcome: tuple[Callable[[Any], None], Any]
            with self._order:
                try:
                    outcome = future.set_result, function(*arguments)
                except BaseException as error:  # noqa: BLE001 - raised where it is awaited
                    outcome = future.set_exception, error
            with contextlib.suppress(RuntimeError):  # the loop is closed: no task awaits it
                loop.call_soon_threadsafe(settle, *outcome)

        threads.start("trainsync-async-explorer", work, threading.Event())
        return future
