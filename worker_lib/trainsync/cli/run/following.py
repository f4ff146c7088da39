"""Look again and again, through short absences of the API server."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

from trainsync.cli.output.console import say
from trainsync.cli.run.errors import NotReachedError

LookT = TypeVar("LookT")

_AGAIN_SECONDS: Final = 2.0
# So long an API server may be away.
_PATIENCE_SECONDS: Final = 120.0


async def follow(look: Callable[[], Awaitable[LookT]], tell: Callable[[LookT], bool]) -> LookT:
    """Look and tell until ``tell`` says that it is over; returns the last look.

    Raises:
        NotReachedError: the API server was away for longer than two minutes.
    """
    heard = time.monotonic()
    while True:
        try:
            found = await look()
        except NotReachedError as error:
            if time.monotonic() - heard > _PATIENCE_SECONDS:
                raise
            say(f"{error}; asking again", "yellow")
        else:
            heard = time.monotonic()
            if tell(found):
                return found
        await asyncio.sleep(_AGAIN_SECONDS)
