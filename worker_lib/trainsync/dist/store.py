"""A connection to the process group's store on which no request waits without end."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final, Protocol, TypeVar

ResultT = TypeVar("ResultT")

ANSWER_SECONDS: Final = 10.0
"""A store that does not answer for so long is gone: its host was stopped, or cut off."""

_CONNECT_SECONDS: Final = 5.0


class GroupStore(Protocol):
    """The needed part of ``torch.distributed.Store``."""

    def set(self, key: str, value: str, /) -> None: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def add(self, key: str, amount: int, /) -> int: ...
    def delete_key(self, key: str, /) -> bool: ...


class BoundedStore:
    """``store``, asked in a thread, since the store's own timeout does not bound every request.

    Every method raises `RuntimeError` when the store is gone, or has not answered in time once.

    Args:
        store: nothing else waits on it.
        seconds: for one request.
    """

    def __init__(self, store: GroupStore, seconds: float = ANSWER_SECONDS) -> None:
        self._store = store
        self._seconds = seconds
        self._silent = False
        self._requests: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="trainsync-store", daemon=True).start()

    def set(self, key: str, value: str, /) -> None:
        """See ``torch.distributed.Store``; so are the others."""
        self._ask(lambda: self._store.set(key, value))

    def get(self, key: str, /) -> bytes:
        """Only what is there: it would be waited for."""
        return self._ask(lambda: self._store.get(key))

    def check(self, keys: list[str], /) -> bool:
        """Whether all of them are there."""
        return self._ask(lambda: self._store.check(keys))

    def add(self, key: str, amount: int, /) -> int:
        """The sum."""
        return self._ask(lambda: self._store.add(key, amount))

    def delete_key(self, key: str, /) -> bool:
        """Whether it was there."""
        return self._ask(lambda: self._store.delete_key(key))

    def _ask(self, request: Callable[[], ResultT]) -> ResultT:
        answer: Future[ResultT] = Future()

        def run() -> None:
            try:
                answer.set_result(request())
            except BaseException as error:  # noqa: BLE001 - the caller gets it
                answer.set_exception(error)

        if not self._silent:
            self._requests.put(run)
            with suppress(TimeoutError):
                return answer.result(self._seconds)
            self._silent = True
        raise RuntimeError(f"it did not answer within {self._seconds:g} s")

    def _run(self) -> None:
        while True:
            self._requests.get()()


def connect(store: Any) -> BoundedStore:
    """A connection of its own to the ``torch.distributed.Store``; where there can be but one, that.

    That one, too, where none comes in time: the store's host is gone, which requests then say.
    """
    cloned: Future[Any] = Future()

    def clone() -> None:  # for as long as the store's own timeout, half an hour
        with suppress(RuntimeError, NotImplementedError):
            own = store.clone()
            own.set_timeout(timedelta(seconds=ANSWER_SECONDS))
            cloned.set_result(own)
            return
        cloned.set_result(store)

    threading.Thread(target=clone, name="trainsync-store-connect", daemon=True).start()
    with suppress(TimeoutError):
        return BoundedStore(cloned.result(_CONNECT_SECONDS))
    return BoundedStore(store)
