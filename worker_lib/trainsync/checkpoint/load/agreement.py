"""Ranks that load together tell one another how it went, so that none waits for one that failed.

Not by a collective: a rank that failed, or died, would leave the others in it. Through the store
of the process group instead, where each waits for a word with a deadline of its own.
"""

import json
import logging
import time
from collections.abc import Callable
from typing import Protocol

import torch.distributed as dist

from trainsync.checkpoint.errors import LoadFailedError

logger = logging.getLogger(__name__)

_POLL_SECONDS = (0.002, 0.2)  # first and longest pause between two looks
_SHOWN = 5
_LINGER_SECONDS = 5.0  # rank 0 often hosts the store: it may not end before the others have read


class Store(Protocol):
    """What is needed of ``torch.distributed.Store``."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def add(self, key: str, amount: int, /) -> int: ...


class Agreement:
    """One load by all ranks; make one on every rank for every load.

    Args:
        store: the ranks' own; None for a single rank.
        timeout: seconds for which rank 0 waits for the others; they wait for it twice as long.
        clock, sleep: of monotonic seconds.
    """

    def __init__(
        self,
        store: Store | None,
        rank: int,
        world_size: int,
        timeout: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._store = store
        self._timeout = timeout
        self._clock = clock
        self._sleep = sleep
        self._prefix = ""
        if store is not None:
            # Counted in the store, so that ranks of a new group begin at one like the others.
            number = store.add(f"trainsync/load/{rank}", 1)
            self._prefix = f"trainsync/load/{number}"

    def do(self, what: str, work: Callable[[], str]) -> list[str]:
        """Do ``work`` on every rank; returns all ranks' results, by rank, when all succeeded.

        Raises:
            LoadFailedError: another rank failed, or said nothing in time; names it and its cause.
            What ``work`` raises, on the rank that it failed on.
        """
        if self._store is None:
            return [work()]
        try:
            answer = {"result": work()}
        except BaseException as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
            try:
                self._answer(self._store, what, answer)
                if self.rank == 0:
                    self._publish(self._store, what, [answer])
                else:
                    self._store.set(self._key(what, f"{self.rank}/read"), "")
            except (LoadFailedError, RuntimeError) as store_error:
                logger.warning("%s: the others cannot be told of %r: %s", what, error, store_error)
            raise
        self._answer(self._store, what, answer)
        answers = (
            self._conclude(self._store, what)
            if self.rank == 0
            else self._await_conclusion(self._store, what)
        )
        failed = [f"rank {n}: {a['error']}" for n, a in enumerate(answers) if "error" in a]
        if failed:
            more = f"; and {len(failed) - _SHOWN} more" if len(failed) > _SHOWN else ""
            raise LoadFailedError(f"{what} failed on {'; '.join(failed[:_SHOWN])}{more}")
        return [answer["result"] for answer in answers]

    # -- inside -----------------------------------------------------------------------------

    def _answer(self, store: Store, what: str, answer: dict[str, str]) -> None:
        try:
            store.set(self._key(what, self.rank), json.dumps(answer))
        except RuntimeError as error:
            raise LoadFailedError(f"{what}: the other ranks cannot be told: {error}") from error

    def _conclude(self, store: Store, what: str) -> list[dict[str, str]]:
        """Rank 0: collect the answers, and publish them."""
        deadline = self._clock() + self._timeout
        answers = []
        for rank in range(self.world_size):
            key = self._key(what, rank)
            if self._wait(store, what, key, deadline):
                answers.append(json.loads(store.get(key)))
            else:
                answers.append({"error": f"said nothing within {self._timeout:g} s"})
        self._publish(store, what, answers)
        return answers

    def _publish(self, store: Store, what: str, answers: list[dict[str, str]]) -> None:
        store.set(self._key(what, "all"), json.dumps(answers))
        if any("error" in answer for answer in answers):
            deadline = self._clock() + min(self._timeout, _LINGER_SECONDS)
            readers = [self._key(what, f"{n}/read") for n in range(1, self.world_size)]
            while readers and self._clock() < deadline:
                readers = [key for key in readers if not store.check([key])]
                self._sleep(_POLL_SECONDS[0])

    def _await_conclusion(self, store: Store, what: str) -> list[dict[str, str]]:
        key = self._key(what, "all")
        seconds = 2 * self._timeout
        if not self._wait(store, what, key, self._clock() + seconds):
            raise LoadFailedError(f"{what}: rank 0 said nothing within {seconds:g} s")
        answers: list[dict[str, str]] = json.loads(store.get(key))
        store.set(self._key(what, f"{self.rank}/read"), "")
        return answers

    def _wait(self, store: Store, what: str, key: str, deadline: float) -> bool:
        # Looked at again and again: a blocking wait would keep the store from everything else
        # in this process.
        pause, longest = _POLL_SECONDS
        while True:
            try:
                if store.check([key]):
                    return True
            except RuntimeError as error:
                raise LoadFailedError(
                    f"{what}: the store of the process group is gone (its host, mostly rank 0, "
                    f"ended?): {error}"
                ) from error
            left = deadline - self._clock()
            if left <= 0:
                return False
            self._sleep(min(pause, left))
            pause = min(2 * pause, longest)

    def _key(self, what: str, whose: int | str) -> str:
        return f"{self._prefix}/{what}/{whose}"


def open_agreement(timeout: float) -> Agreement:
    """Of the ranks of the default process group; of this process alone when there is none."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return Agreement(None, 0, 1, timeout)
    store = dist.distributed_c10d._get_default_store()
    return Agreement(store, dist.get_rank(), dist.get_world_size(), timeout)
