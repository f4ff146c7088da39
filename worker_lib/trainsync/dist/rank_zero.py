"""Rank 0 tells the other ranks words by key, and answers, without waiting for them.

An `Agreement` keeps ranks in step; here rank 0 may be many steps ahead, or be the only rank that
calls. The other ranks wait for its word with a deadline, and hear when rank 0 is gone.
"""

import json
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import torch.distributed as dist

from trainsync.dist import heartbeat
from trainsync.dist.agreement import LINGER_SECONDS, LostRanks, describe, store_gone
from trainsync.dist.errors import PeerError, PeerLostError
from trainsync.dist.store import GroupStore

logger = logging.getLogger(__name__)

_POLL_SECONDS: Final = (0.005, 0.1)  # first and longest pause between two looks
_LOST_POLL: Final = 0.5
_WARN_SECONDS: Final = 10.0


class RankZero:
    """Rank 0's words for the other ranks.

    Args:
        store: the ranks' own.
        lost: None: that rank 0 is gone is noticed only when the time is over.
        kept: so many words by key are kept: with GPUs rank 0 may be many steps ahead.
        clock, sleep: of monotonic seconds.
    """

    def __init__(
        self,
        store: GroupStore,
        rank: int,
        world_size: int,
        *,
        lost: LostRanks | None = None,
        kept: int = 1000,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.rank = rank
        self._store = store
        self._world_size = world_size
        self._lost = lost
        self._kept = kept
        self._clock = clock
        self._sleep = sleep
        self._told: deque[str] = deque()

    def tell(self, what: str, word: str) -> None:
        """On rank 0: leave ``word`` for `told`; does not wait for the other ranks.

        Raises:
            PeerLostError: the store is gone.
        """
        key = f"trainsync/told/{what}"
        try:
            self._store.set(key, word)
            if not self._told or self._told[-1] != key:
                self._told.append(key)
            while len(self._told) > self._kept:
                self._store.delete_key(self._told.popleft())
        except RuntimeError as error:
            raise store_gone(what, error) from error

    def told(self, what: str, seconds: float) -> str:
        """On the other ranks: the word that rank 0 leaves, at most ``seconds`` later.

        Raises:
            PeerError: rank 0 left none in time.
            PeerLostError: rank 0 is gone, or the store is.
        """
        return self._await(f"trainsync/told/{what}", what, seconds)

    def ask_once(self, what: str, ask: Callable[[], str], seconds: float) -> str:
        """Rank 0 asks and leaves the answer for the other ranks: all have the same.

        Rank 0 does not wait for them, which need not call; each rank's n-th call takes rank 0's
        n-th answer.

        Args:
            seconds: that the other ranks wait for rank 0.

        Raises:
            PeerError: rank 0 could not ask, or said nothing in time.
            PeerLostError: rank 0 is gone, or the store is.
            What ``ask`` raises, on rank 0.
        """
        try:
            number = self._store.add(f"trainsync/{what}/calls/{self.rank}", 1)
        except RuntimeError as error:
            raise store_gone(what, error) from error
        key = f"trainsync/{what}/{number}"
        if self.rank == 0:
            return self._answer(key, what, ask)
        said = json.loads(self._await(key, what, seconds))
        with suppress(RuntimeError):  # rank 0 has ended
            self._store.set(f"{key}/read/{self.rank}", "")
        if "error" in said:
            raise PeerError(f"{what}: rank 0 could not ask: {said['error']}")
        return str(said["answer"])

    def _answer(self, key: str, what: str, ask: Callable[[], str]) -> str:
        try:
            answer = ask()
        except Exception as error:
            with suppress(RuntimeError):  # the store is gone; the error says more
                self._store.set(key, json.dumps({"error": describe(error)}))
                self._linger(key)
            raise
        try:
            self._store.set(key, json.dumps({"answer": answer}))
        except RuntimeError as error:
            raise store_gone(what, error) from error
        return answer

    def _linger(self, key: str) -> None:
        """Rank 0 often hosts the store, and ends with what it raises: the others read it first."""
        end = self._clock() + LINGER_SECONDS
        readers = [f"{key}/read/{rank}" for rank in range(1, self._world_size)]
        while not self._store.check(readers) and self._clock() < end:
            self._sleep(_POLL_SECONDS[0])

    def _await(self, key: str, what: str, seconds: float) -> str:
        # Polled: a blocking wait would keep the store from all other requests of this process.
        try:
            self._wait(key, what, seconds)
            return self._store.get(key).decode()
        except RuntimeError as error:
            raise store_gone(what, error) from error

    def _wait(self, key: str, what: str, seconds: float) -> None:
        began = looked = self._clock()
        pause, has_warned = _POLL_SECONDS[0], False
        while not self._store.check([key]):
            now = self._clock()
            if now - began > _WARN_SECONDS and not has_warned:
                logger.warning("%s: waiting for rank 0, which has not asked yet", what)
                has_warned = True
            if now - looked >= _LOST_POLL and self._lost is not None:
                looked, cause = now, self._lost.lost().get(0)
                # Looked at again: rank 0 may have ended just after it left the word.
                if cause is not None and not self._store.check([key]):
                    raise PeerLostError(f"{what}: rank 0 is gone: {cause}")
            if now - began > seconds:
                raise PeerError(
                    f"{what}: rank 0 said nothing within {seconds:g} s; expected every rank to "
                    "make this call, or rank 0 alone"
                )
            self._sleep(pause)
            pause = min(2 * pause, _POLL_SECONDS[1])


_of: "weakref.WeakKeyDictionary[object, RankZero]" = weakref.WeakKeyDictionary()
_making = threading.Lock()


def open_rank_zero() -> RankZero:
    """That of the default process group, which has several ranks; made once."""
    group = dist.distributed_c10d._get_default_group()
    with _making:
        found = _of.get(group)
        if found is None:
            store, heart = heartbeat.start()
            found = RankZero(store, dist.get_rank(), dist.get_world_size(), lost=heart)
            _of[group] = found
        return found
