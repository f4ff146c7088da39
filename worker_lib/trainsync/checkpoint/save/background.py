"""Threads that write what was staged; those of one name one after the other."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from trainsync.checkpoint.errors import SaveFailedError
from trainsync.checkpoint.save.workers import Workers

logger = logging.getLogger(__name__)


@dataclass
class _Task:
    """Kept until the next save of its name, so it holds nothing large."""

    label: str
    is_tolerant: bool
    written: threading.Event = field(default_factory=threading.Event)
    taken: threading.Lock = field(default_factory=threading.Lock)
    """Held for good by the worker that does it, or by the caller that called it off."""


class BackgroundWrites:
    """Runs ``copy``, ``write`` and ``tell`` of each save behind the trainer.

    ``write`` waits for that of the save of the same name before, ``copy`` does not: training may be
    waiting for it. Nobody waits for ``tell``: a monitor that is away must not hold up the disk.
    What any raises is kept for `raise_failures`. Each save in flight has a worker (memory bounds
    their number), which is kept for the next save: to start a thread is to wait until the system
    runs it, which on a busy machine takes longer than all else that the caller waits for.

    Args:
        is_failure: told of all that is raised, in the thread that raised it; says whether to keep
            it.
    """

    def __init__(self, is_failure: Callable[[BaseException], bool]) -> None:
        self._is_failure = is_failure
        self._workers = Workers("trainsync-save")
        self._tellers: set[threading.Thread] = set()
        self._last: dict[str, _Task] = {}  # of each name
        self._lock = threading.Lock()
        self._failures: list[BaseException] = []

    def start(
        self,
        name: str,
        label: str,
        write: Callable[[], None],
        tell: Callable[[], None],
        copy: Callable[[], None] = lambda: None,
        *,
        tolerant: bool = False,
    ) -> None:
        """Begin; returns at once. ``label`` names the save for people.

        Args:
            tolerant: an error is logged, and not kept for `raise_failures`.

        Raises:
            RuntimeError: the system has no thread left; nothing was begun.
        """
        task, previous = _Task(label, tolerant), self._last.get(name)
        try:
            self._workers.submit(self._run, task, previous, copy, write, tell)
        except RuntimeError:
            # It may stand in the queue of the workers that there are, and have been begun by one.
            if task.taken.acquire(blocking=False):
                raise
        self._last[name] = task

    def wait(self, timeout: float | None, name: str | None = None) -> list[str]:
        """Wait until everything (of ``name``) is written; labels of what is not after ``timeout``.

        None waits without end.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        tasks = [task for key, task in self._last.items() if name in (None, key)]
        for task in tasks:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            task.written.wait(left)
        return sorted(task.label for task in tasks if not task.written.is_set())

    def follow(self, name: str, other: "BackgroundWrites") -> None:
        """Take the last save of ``name`` of ``other`` for the last one here: it is waited for."""
        if (task := other._last.get(name)) is not None:
            self._last[name] = task

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
            tellers = list(self._tellers)
        for thread in (*workers, *tellers):
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _run(
        self,
        task: _Task,
        previous: _Task | None,
        copy: Callable[[], None],
        write: Callable[[], None],
        tell: Callable[[], None],
    ) -> None:
        if not task.taken.acquire(blocking=False):
            return  # called off
        try:
            copy()
            if previous is not None:
                previous.written.wait()
            write()
        except BaseException as error:  # noqa: BLE001 - kept for the caller
            self._keep(task, error)
            return
        finally:
            task.written.set()
        # In a thread of its own, as a monitor that is away keeps it until its deadline. A daemon:
        # the process may end, since the monitor finds on the disk what it was not told.
        teller = threading.Thread(
            target=self._tell, args=(task, tell), name=f"trainsync-tell-{task.label}", daemon=True
        )
        try:
            with self._lock:
                teller.start()
                self._tellers = {one for one in self._tellers if one.is_alive()} | {teller}
        except RuntimeError:  # no thread left
            self._tell(task, tell)

    def _tell(self, task: _Task, tell: Callable[[], None]) -> None:
        try:
            tell()
        except BaseException as error:  # noqa: BLE001 - kept for the caller
            self._keep(task, error)

    def _keep(self, task: _Task, error: BaseException) -> None:
        if self._is_failure(error):
            logger.error("%s", error)
            # What ends the process is not for anybody to tolerate.
            if not (task.is_tolerant and isinstance(error, Exception)):
                with self._lock:
                    self._failures.append(error)
