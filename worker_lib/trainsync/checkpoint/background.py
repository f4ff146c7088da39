"""Threads that write what was staged; those of one name one after the other."""

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

logger = logging.getLogger(__name__)


@dataclass
class _Task:
    label: str
    written: threading.Event = field(default_factory=threading.Event)


class BackgroundWrites:
    """Runs ``write``, then ``tell``, of each save in a thread of its own.

    The next save of a name waits for ``write`` of the one before, not for ``tell``: a monitor that
    is away must not hold up the disk. What either raises is kept for `take_failures`. The threads
    are not daemons: a process that ends first finishes what it has staged.

    Args:
        on_failure: told of each failure, in the thread that failed.
    """

    def __init__(self, on_failure: Callable[[], None]) -> None:
        self._on_failure = on_failure
        self._last: dict[str, _Task] = {}  # of each name
        self._lock = threading.Lock()
        self._failures: list[BaseException] = []

    def start(
        self, name: str, label: str, write: Callable[[], None], tell: Callable[[], None]
    ) -> None:
        """Begin; returns at once. ``label`` names the save for people."""
        task, previous = _Task(label), self._last.get(name)
        threading.Thread(
            target=self._run, args=(task, previous, write, tell), name=f"ckpt-{label}"
        ).start()
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

    def take_failures(self) -> list[BaseException]:
        """What failed since the last call, oldest first."""
        with self._lock:
            failures, self._failures = self._failures, []
        return failures

    def _run(
        self,
        task: _Task,
        previous: _Task | None,
        write: Callable[[], None],
        tell: Callable[[], None],
    ) -> None:
        try:
            if previous is not None:
                previous.written.wait()
            write()
        except BaseException as error:  # noqa: BLE001 - kept for the caller
            self._keep(error)
            return
        finally:
            task.written.set()
        try:
            tell()
        except BaseException as error:  # noqa: BLE001 - kept for the caller
            self._keep(error)

    def _keep(self, error: BaseException) -> None:
        logger.error("%s", error)
        with self._lock:
            self._failures.append(error)
        self._on_failure()
