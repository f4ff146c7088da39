"""A number that goes up with every change, and whoever waits for one. For one event loop."""

import asyncio
from collections.abc import Callable


class Revision:
    """Counts changes, and wakes those who wait for what a change may bring."""

    def __init__(self) -> None:
        self.number = 0
        self.wakes = 0
        self._changed = asyncio.Condition()

    async def advance(self) -> None:
        """Something has changed."""
        self.number += 1
        await self.wake()

    async def wake(self) -> None:
        """Let everybody look again, though the number stays."""
        self.wakes += 1
        async with self._changed:
            self._changed.notify_all()

    async def wait_for(self, condition: Callable[[], bool], seconds: float) -> bool:
        """Until ``condition()``, which is asked after each change; False after ``seconds``."""
        try:
            async with asyncio.timeout(seconds), self._changed:
                await self._changed.wait_for(condition)
        except TimeoutError:
            return False
        return True
