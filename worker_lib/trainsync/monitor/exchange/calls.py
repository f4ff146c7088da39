"""Passes calls of the Synchronizer from explorers of one Ray cluster to the trainers' cluster.

Neither side can reach the other's Ray: explorers ask here, and the process that made the
Synchronizer fetches the calls and brings the answers. For one event loop.
"""

import asyncio
import json
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Final

from trainsync.api.protocol import (
    SynchronizerAnswer,
    SynchronizerCall,
    SynchronizerCalls,
    SynchronizerReply,
)
from trainsync.monitor.change_signal import ChangeSignal
from trainsync.monitor.errors import FencedError, InvalidRequestError, TooManyWaitersError
from trainsync.monitor.ledger.saves import SaveOwner

MOST_CALLS: Final = 8192
"""An explorer has one or two at a time; those of processes that ended stay for a minute."""
LONGEST_CALL: Final = 64 << 10
"""Bytes of the arguments of a call."""
FORGET_SECONDS: Final = 60.0
"""After which an open call is forgotten whose caller does not ask any more."""
_SWEEP_SECONDS: Final = 1.0
_MOST_AT_ONCE: Final = 256


@dataclass
class _Open:
    """A call; ``left`` is when its caller last stopped waiting."""

    number: int
    call: SynchronizerCall
    left: float
    waiting: int = 0
    reply: SynchronizerReply | None = None
    answered: asyncio.Event = field(default_factory=asyncio.Event)


class Exchange:
    """Open calls of one attempt.

    A call stays open until it is answered, so that a new process on the other side, or one that
    lost an answer of this monitor, gets the call again: calls may be made twice.

    Attributes:
        epoch: names this object, whose numbers of calls no other continues.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.epoch = secrets.token_hex(8)
        self._clock = clock
        self._attempt = -1
        self._admitted: set[SaveOwner] = set()
        self._open: dict[str, _Open] = {}
        self._last = 0
        self._added = ChangeSignal()
        self._swept_at = clock()

    def admits(self, owner: SaveOwner) -> bool:
        """Whether `admit` let this owner in, and no newer attempt since."""
        return owner in self._admitted

    def admit(self, owner: SaveOwner) -> None:
        """Let an owner in that is in force; calls of an older attempt are forgotten.

        Raises:
            FencedError: a newer attempt was let in meanwhile.
        """
        self._fence(owner)
        if owner.attempt > self._attempt:
            self._attempt = owner.attempt
            self._admitted.clear()
            for entry in self._open.values():
                entry.answered.set()  # without a reply: its caller asks again, and is refused
            self._open.clear()
        self._admitted.add(owner)

    def dismiss(self, owner: SaveOwner) -> None:
        """An owner is not in force any more: its successor is let in when it asks."""
        self._admitted.discard(owner)

    async def ask(
        self, owner: SaveOwner, call: SynchronizerCall, seconds: float
    ) -> SynchronizerReply:
        """The answer to a call, if it comes within ``seconds``.

        Raises:
            TooManyWaitersError: there are too many open calls.
            InvalidRequestError: the call is too long.
            FencedError: the attempt is over.
        """
        self._fence(owner)
        entry = self._open.get(call.id)
        if entry is None:
            self._forget()
            if len(json.dumps(call.arguments)) > LONGEST_CALL:
                raise InvalidRequestError(
                    f"the arguments of {call.method} have more than {LONGEST_CALL} bytes"
                )
            if len(self._open) >= MOST_CALLS:
                raise TooManyWaitersError(f"{MOST_CALLS} calls of the Synchronizer are open")
            self._last += 1
            entry = self._open[call.id] = _Open(self._last, call, self._clock())
            self._added.notify()
        entry.waiting += 1
        try:
            if not self._added.closing:
                await ChangeSignal.wait(entry.answered, seconds)
        finally:
            entry.waiting -= 1
            entry.left = self._clock()
        if entry.reply is None:
            return SynchronizerReply(done=False)
        self._open.pop(call.id, None)
        return entry.reply

    async def calls(
        self, owner: SaveOwner, epoch: str, after: int, seconds: float
    ) -> SynchronizerCalls:
        """Unanswered calls after number ``after`` of ``epoch``; waits ``seconds`` for one.

        Raises:
            FencedError: the attempt is over.
        """
        begin = after if epoch == self.epoch else 0

        async def look() -> list[_Open]:
            self._fence(owner)
            entries = self._open.values()
            return [e for e in entries if e.number > begin and e.reply is None][:_MOST_AT_ONCE]

        found = await self._added.until(look, bool, seconds)
        last = found[-1].number if found else begin
        calls = [entry.call for entry in found]
        return SynchronizerCalls(epoch=self.epoch, last=last, calls=calls)

    def answer(self, owner: SaveOwner, answers: Iterable[SynchronizerAnswer]) -> None:
        """Hand answers to the callers that wait, or come back.

        Raises:
            FencedError: the attempt is over.
        """
        self._fence(owner)
        for answer in answers:
            entry = self._open.get(answer.id)
            if entry is not None:
                entry.reply = SynchronizerReply(done=True, value=answer.value, error=answer.error)
                entry.answered.set()

    def close(self) -> None:
        """The process is ending: nothing waits any more."""
        self._added.close()
        for entry in self._open.values():
            entry.answered.set()

    def _fence(self, owner: SaveOwner) -> None:
        if owner.attempt < self._attempt:
            raise FencedError(f"attempt {self._attempt} is in force, not {owner.attempt}")

    def _forget(self) -> None:
        now = self._clock()
        if now - self._swept_at < _SWEEP_SECONDS and len(self._open) < MOST_CALLS:
            return
        self._swept_at, oldest = now, now - FORGET_SECONDS
        gone = [name for name, e in self._open.items() if not e.waiting and e.left < oldest]
        for name in gone:
            del self._open[name]
