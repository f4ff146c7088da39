"""Tells coroutines that something in the core changed."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

ResultT = TypeVar("ResultT")


class ChangeSignal:
    """Bridges the core's thread and the event loop that made this object.

    Take the event, look at the state, then wait for the event: no change in between is missed.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._event = asyncio.Event()
        self.closing = False

    def notify_threadsafe(self) -> None:
        """Called from any thread; does nothing once the loop is closed."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.notify)

    def close(self) -> None:
        """Wake all waiters for good: the process is ending."""
        self.closing = True
        self.notify()

    async def until(
        self,
        look: Callable[[], Awaitable[ResultT]],
        done: Callable[[ResultT], bool],
        seconds: float,
    ) -> ResultT:
        """Look, and again after each change, until ``done`` with the answer, or for ``seconds``.

        Returns the last answer at once when the process is ending.
        """
        end = time.monotonic() + seconds
        while True:
            changed = self.event()
            answer = await look()
            left = end - time.monotonic()
            if done(answer) or left <= 0 or self.closing:
                return answer
            await self.wait(changed, left)

    def event(self) -> asyncio.Event:
        """Set at the next change."""
        return self._event

    @staticmethod
    async def wait(event: asyncio.Event, seconds: float) -> None:
        """Wait for ``event``, or for so many seconds."""
        try:
            async with asyncio.timeout(seconds):
                await event.wait()
        except TimeoutError:
            return

    def notify(self) -> None:
        """Called from the thread of the event loop."""
        before, self._event = self._event, asyncio.Event()
        before.set()
