"""Look again and again, through short absences of the API server."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Self, TypeVar

import typer

from trainsync.cli.output.console import say
from trainsync.cli.run.errors import NotReachedError

LookT = TypeVar("LookT")


@dataclass(frozen=True)
class PollTimes:
    """How often the commands look at a run, and how long they wait.

    Attributes:
        again_seconds: between two looks.
        patience_seconds: for which the API server may be away.
        answer_seconds: for which the monitor may take to answer a request.
    """

    again_seconds: float = 2.0
    patience_seconds: float = 120.0
    answer_seconds: float = 60.0  # the monitor looks at the run every 5 s

    @classmethod
    def of(cls, invocation: typer.Context) -> Self:
        """The pace that the caller of the command passed as ``obj``, else the default."""
        return invocation.obj if isinstance(invocation.obj, cls) else cls()


async def follow(
    look: Callable[[], Awaitable[LookT]], tell: Callable[[LookT], bool], pace: PollTimes
) -> LookT:
    """Look and tell until ``tell`` says that it is over; returns the last look.

    Raises:
        NotReachedError: the API server was away for longer than the pace allows.
    """
    heard = time.monotonic()
    while True:
        try:
            found = await look()
        except NotReachedError as error:
            if time.monotonic() - heard > pace.patience_seconds:
                raise
            say(f"{error}; asking again", "yellow")
        else:
            heard = time.monotonic()
            if tell(found):
                return found
        await asyncio.sleep(pace.again_seconds)
