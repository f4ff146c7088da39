"""Threads for saves: workers that are kept, one thread for many items, one for an event loop."""

import asyncio
import threading
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, TypeVar, cast

ItemT = TypeVar("ItemT")
ResultT = TypeVar("ResultT")


class _Queue:
    """The tasks of workers. The threads know the queue alone, so they do not keep `Workers`."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.tasks: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self.idle = 0
        self.closed = False

    def close(self) -> None:
        """The threads end once no task is left."""
        with self.changed:
            self.closed = True
            self.changed.notify_all()

    def work(self) -> None:
        while True:
            with self.changed:
                self.idle += 1
                self.changed.wait_for(lambda: self.tasks or self.closed)
                self.idle -= 1
                if not self.tasks:
                    return
                run, arguments = self.tasks.popleft()
            run(*arguments)
            del run, arguments  # they may hold memory until the next task


class Workers:
    """As many threads as there are tasks at once. They end with this object.

    Daemons, unlike those of a ThreadPoolExecutor: the interpreter does not wait for them without
    end. The owner of this object waits at exit (`trainsync.checkpoint.save.ending`).

    Args:
        name: of the threads, with a number behind it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue = _Queue()
        self._threads: list[threading.Thread] = []
        weakref.finalize(self, self._queue.close)

    def submit(self, run: Callable[..., object], *arguments: Any) -> None:
        """Run ``run(*arguments)`` soon; it raises nothing.

        Raises:
            RuntimeError: the system has no thread left, or `close` was called; it will not run.
        """
        queue = self._queue
        with queue.changed:
            if queue.closed:
                raise RuntimeError(f"{self._name}: no task is taken any more")
            if queue.idle <= len(queue.tasks):
                thread = threading.Thread(
                    target=queue.work, name=f"{self._name}_{len(self._threads)}", daemon=True
                )
                self._threads.append(thread)
                try:
                    thread.start()
                except BaseException:
                    self._threads.remove(thread)
                    raise
            queue.tasks.append((run, arguments))
            queue.changed.notify()

    def close(self) -> list[threading.Thread]:
        """Take no more tasks; the threads, which end when all that were taken are done."""
        self._queue.close()
        return self._threads


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
        """Handle these items, too. From any thread.

        Raises:
            RuntimeError: the system has no thread left; none of them will be handled.
        """
        with self._lock:
            if items and not self._works:  # the thread waits for the lock, and finds them
                thread = threading.Thread(target=self._work, name=self._name, daemon=self._daemon)
                thread.start()
                self._works, self._thread = True, thread
            self._items.extend(items)

    def take(self) -> list[ItemT]:
        """The items that were not handled yet; they are not handled any more."""
        with self._lock:
            items = list(self._items)
            self._items.clear()
        return items

    def close(self, timeout: float) -> list[ItemT]:
        """End the thread, after ``timeout`` seconds at most; the items that are left."""
        left = self.take()
        with self._lock:
            self._closed, thread = True, self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)
        return left + self.take()

    @property
    def waiting(self) -> int:
        """The number of items that were not handled yet."""
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


async def in_thread(call: Callable[[], ResultT], stop: threading.Event) -> ResultT:
    """``call()`` in a thread, as `asyncio.to_thread`, but a cancelled caller does not wait for it.

    ``asyncio.run`` waits for the threads of its executor, which here may be in a long question to
    the monitor.

    Args:
        stop: is set when the caller is gone; ``call`` then ends soon.
    """
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[ResultT] = loop.create_future()

    def give(result: ResultT | None, error: BaseException | None) -> None:
        if answer.done():  # the caller is gone
            return
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(cast("ResultT", result))

    def run() -> None:
        result, raised = None, None
        try:
            result = call()
        except BaseException as error:  # noqa: BLE001 - raised in the caller
            raised = error
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(give, result, raised)

    threading.Thread(target=run, name="trainsync-await-commit", daemon=True).start()
    try:
        return await answer
    finally:
        stop.set()
