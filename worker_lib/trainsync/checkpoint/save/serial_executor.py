"""One thread that handles items one after the other."""

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

ItemT = TypeVar("ItemT")


class SerialExecutor(Generic[ItemT]):
    """Handles items in one thread, which lives while there are items.

    Args:
        name: of the thread.
        do: handles one item; with False the item is handled again after all others. It raises
            nothing.
        daemon: whether a process ends without the items that are left.
    """

    def __init__(self, name: str, do: Callable[[ItemT], bool], *, daemon: bool) -> None:
        self._name = name
        self._do = do
        self._daemon = daemon
        self._items: deque[ItemT] = deque()
        self._works = False
        self._closed = False
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def add(self, *items: ItemT) -> None:
        """Do these, too. From any thread.

        Raises:
            RuntimeError: the system has no thread left; none of them will be done.
        """
        with self._lock:
            if items and not self._works:  # the thread waits for the lock, and finds them
                thread = threading.Thread(target=self._work, name=self._name, daemon=self._daemon)
                thread.start()
                self._works, self._thread = True, thread
            self._items.extend(items)

    def take(self) -> list[ItemT]:
        """What has not come up yet; it is not done any more."""
        with self._lock:
            items = list(self._items)
            self._items.clear()
        return items

    def close(self, timeout: float) -> list[ItemT]:
        """End the thread, waiting ``timeout`` seconds for what it is at; what was left to do."""
        left = self.take()
        with self._lock:
            self._closed, thread = True, self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)
        return left + self.take()

    @property
    def waiting(self) -> int:
        """How many have not come up yet."""
        return len(self._items)

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._items or self._closed:
                    self._works = False
                    return
                item = self._items.popleft()
            if not self._do(item):
                with self._lock:
                    self._items.append(item)
