"""Tells coroutines that something in the core changed."""

import asyncio


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
            self._loop.call_soon_threadsafe(self._notify)

    def close(self) -> None:
        """Wake all waiters for good: the process is ending."""
        self.closing = True
        self._notify()

    def event(self) -> asyncio.Event:
        """Set at the next change."""
        return self._event

    @staticmethod
    async def wait(event: asyncio.Event, seconds: float) -> None:
        """Until ``event``, or so many seconds."""
        try:
            async with asyncio.timeout(seconds):
                await event.wait()
        except TimeoutError:
            return

    def _notify(self) -> None:
        before, self._event = self._event, asyncio.Event()
        before.set()
