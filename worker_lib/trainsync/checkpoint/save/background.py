"""The saves behind the trainer: written in worker threads, those of one name in their order."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from trainsync.checkpoint.errors import SaveFailedError, SaveSkippedError
from trainsync.checkpoint.save.stats import Counters
from trainsync.checkpoint.save.threads import Workers

logger = logging.getLogger(__name__)

_NOTHING_BEFORE = threading.Event()
_NOTHING_BEFORE.set()


@dataclass
class _Task:
    """One save that a worker writes. Kept until the next save of its name, so it holds no state."""

    label: str
    is_tolerated: bool
    written: threading.Event = field(default_factory=threading.Event)
    taken: threading.Lock = field(default_factory=threading.Lock)
    """Held for good by the worker that runs the task, or by the caller that called it off."""


class BackgroundWrites:
    """Runs each save in a worker thread, and keeps what it raises for `raise_failures`.

    Each save in flight has a worker (memory bounds their number), which is kept for the next save:
    to start a thread is to wait until the system runs it, which on a busy machine takes longer than
    all else that the caller waits for.

    Args:
        counters: count what is kept.
    """

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._workers = Workers("trainsync-save")
        self._reporters: set[threading.Thread] = set()
        self._last: dict[str, _Task] = {}  # of each name
        self._lock = threading.Lock()  # guards the reporters and the failures
        self._failures: list[BaseException] = []

    def start(
        self,
        name: str,
        label: str,
        save: Callable[..., object],
        *arguments: object,
        is_tolerated: bool = False,
    ) -> None:
        """Run ``save(before, *arguments)`` in a worker; returns at once.

        Args:
            label: names the save for people.
            save: ``before`` is set once the save of ``name`` before this one is written. A save
                copies at once, since training may wait for the copy, and waits for ``before``
                with its files.
            is_tolerated: what it raises is logged and counted, and not kept.

        Raises:
            RuntimeError: the system has no thread left; nothing was begun.
        """
        task, previous = _Task(label, is_tolerated), self._last.get(name)
        before = _NOTHING_BEFORE if previous is None else previous.written
        try:
            self._workers.submit(self._run, task, save, before, *arguments)
        except RuntimeError:
            # A worker may have taken the task from the queue although no new thread was found.
            if task.taken.acquire(blocking=False):
                raise
        self._last[name] = task

    def start_report(
        self,
        label: str,
        report: Callable[..., object],
        *arguments: object,
        is_tolerated: bool = False,
    ) -> None:
        """Run ``report(*arguments)`` in a thread of its own, for which no save waits.

        A monitor that is away keeps that thread until its deadline, and must not hold up the disk.
        The process may end meanwhile: the monitor finds on the disk what it was not told.

        Raises:
            RuntimeError: the system has no thread left; nothing was begun.
        """
        thread = threading.Thread(
            target=self._report,
            args=(is_tolerated, report, *arguments),
            name=f"trainsync-tell-{label}",
            daemon=True,
        )
        with self._lock:
            thread.start()
            self._reporters = {one for one in self._reporters if one.is_alive()} | {thread}

    def wait(self, timeout: float | None, name: str | None = None) -> list[str]:
        """Wait until all saves (of ``name``) are written; labels of those that are not in time.

        Args:
            timeout: seconds; None waits without end.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        tasks = [task for key, task in self._last.items() if name in (None, key)]
        for task in tasks:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            task.written.wait(left)
        return sorted(task.label for task in tasks if not task.written.is_set())

    def follow(self, name: str, other: "BackgroundWrites") -> None:
        """Wait here for the last save of ``name`` of ``other``, as for one of this object."""
        if (task := other._last.get(name)) is not None:
            self._last[name] = task

    def keep(self, error: BaseException, *, is_tolerated: bool = False) -> None:
        """Log and count it, and keep it for `raise_failures`. From any thread.

        A save that another rank skipped, as it was configured to do, is no failure.
        """
        if isinstance(error, SaveSkippedError):
            logger.warning("%s", error)
            self._counters.add(skipped=1)
            return
        # An error that ends the process is never tolerated.
        if not (is_tolerated and isinstance(error, Exception)):
            with self._lock:
                self._failures.append(error)
        # Last: a caller that sees the count gets the error from the next call.
        self._counters.add(failures=1)
        logger.error("%s", error)

    def raise_failures(self) -> None:
        """Raise the oldest failure since the last call; the others are notes on it."""
        with self._lock:
            failures, self._failures = self._failures, []
        if not failures:
            return
        first = failures[0]
        for other in failures[1:]:
            first.add_note(f"also: {other}")
        if isinstance(first, Exception):
            raise first
        raise SaveFailedError(f"a background save was ended by {first!r}") from first

    def end(self, deadline: float) -> None:
        """Take no more saves, and end the threads; later than ``deadline`` none is waited for."""
        workers = self._workers.close()
        with self._lock:
            reporters = list(self._reporters)
        for thread in (*workers, *reporters):
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _run(self, task: _Task, save: Callable[..., object], *arguments: object) -> None:
        if not task.taken.acquire(blocking=False):
            return  # called off
        try:
            save(*arguments)
        except BaseException as error:  # noqa: BLE001 - kept for the caller
            self.keep(error, is_tolerated=task.is_tolerated)
        finally:
            task.written.set()

    def _report(
        self, is_tolerated: bool, report: Callable[..., object], *arguments: object
    ) -> None:
        try:
            report(*arguments)
        except BaseException as error:  # noqa: BLE001 - kept for the caller
            self.keep(error, is_tolerated=is_tolerated)
