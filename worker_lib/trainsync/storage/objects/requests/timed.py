"""Requests that are given up at a moment: obstore's own bounds are of a store, not of a call.

A request runs in a loop of this process, whose one thread only starts it and hears of its end.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from obstore import Bytes, GetOptions, GetResult, ObjectMeta
    from obstore.store import ObjectStore

T = TypeVar("T")


class StoreUntil:
    """As much of obstore's store as `ObjectBucket` reads with. All methods raise `TimeoutError` at
    ``deadline`` (`time.monotonic`), where the connection is closed, and else what obstore raises.
    """

    def __init__(self, store: "ObjectStore", deadline: float) -> None:
        self._store = store
        self._deadline = deadline

    def get(self, path: str, *, options: "GetOptions | None" = None) -> "_Got":
        """See obstore."""
        found = _answer(lambda: self._store.get_async(path, options=options), self._deadline)
        return _Got(found, self._deadline)

    def head(self, path: str) -> "ObjectMeta":
        """See obstore."""
        return _answer(lambda: self._store.head_async(path), self._deadline)


class _Got:
    """As much of obstore's ``GetResult``."""

    def __init__(self, found: "GetResult", deadline: float) -> None:
        self._found = found
        self._deadline = deadline

    @property
    def meta(self) -> "ObjectMeta":
        return self._found.meta

    def bytes(self) -> "Bytes":
        return _answer(lambda: self._found.bytes_async(), self._deadline)


def _answer(ask: Callable[[], Coroutine[Any, Any, T]], deadline: float) -> T:
    async def asking() -> T:
        return await ask()  # in the loop, which obstore looks for

    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    answer = asyncio.run_coroutine_threadsafe(asking(), _LOOP.get())
    try:
        return answer.result(left)
    except TimeoutError:
        raise TimeoutError("timed out") from None
    finally:
        answer.cancel()  # which an ended one does not mind


class _Loop:
    """Of this process; its thread begins with the first request."""

    def __init__(self) -> None:
        self._starting = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def get(self) -> asyncio.AbstractEventLoop:
        with self._starting:
            if self._loop is None:
                loop = asyncio.new_event_loop()
                threading.Thread(
                    target=loop.run_forever, name="trainsync-requests", daemon=True
                ).start()
                self._loop = loop
            return self._loop


_LOOP = _Loop()
