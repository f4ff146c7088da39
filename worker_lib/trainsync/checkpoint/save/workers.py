"""Threads that are kept for the next task."""

import threading
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

_Task = tuple[Callable[..., object], tuple[Any, ...]]


class _Queue:
    """What the threads know; they do not keep the `Workers` alive."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.tasks: deque[_Task] = deque()
        self.idle = 0
        self.closed = False

    def close(self) -> None:
        """The threads end when nothing is left to do."""
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
    end. Whoever owns this waits at exit (`trainsync.checkpoint.save.ending`).

    Args:
        name: of the threads, with a number behind it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._queue = _Queue()
        self._threads: list[threading.Thread] = []
        weakref.finalize(self, self._queue.close)

    def submit(self, run: Callable[..., object], *arguments: Any) -> None:
        """Run it soon; it raises nothing.

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
