"""The thread that owns a core: requests one after the other, ticks in between."""

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from typing import Final, Generic, Protocol, TypeVar

from trainsync.monitor.errors import MonitorError, MonitorUnavailableError

ResultT = TypeVar("ResultT")


class Core(Protocol):
    """The calls of a core that the thread makes."""

    @property
    def revision(self) -> int:
        """Grows whenever the state of a save or of a permit changes."""
        ...

    @property
    def ready(self) -> bool:
        """Whether requests can be answered."""
        ...

    @property
    def busy(self) -> bool:
        """Whether a poll soon will have something to do."""
        ...

    def tick(self) -> None:
        """Look at what participants have written, and act on it."""
        ...

    def poll(self) -> None:
        """Act on what was found since, without a look."""
        ...

    def end(self) -> None:
        """Write what the next monitor goes on from, and would else not know."""
        ...


CoreT = TypeVar("CoreT", bound=Core)

_LOG = logging.getLogger(__name__)
_POLL_SECONDS: Final = 0.05
_Job = Callable[[], None]


class CoreThread(Generic[CoreT]):
    """Runs everything that touches ``core``.

    An error that the core does not expect ends the thread: it is kept in `failure`, every waiting
    and later call raises it, and ``on_failure`` is told, so that the process can end and be
    started again with a ledger from disk.

    Args:
        tick_seconds: between two looks at the disk.
        guard: entered around all work with ``core``. What it raises goes to the caller; a
            look at the disk is put off to the next tick.
        on_change: called in this thread after the state of a save or of a permit changed.
    """

    def __init__(
        self,
        core: CoreT,
        *,
        tick_seconds: float = 1.0,
        guard: Callable[[], AbstractContextManager[None]] = nullcontext,
        on_change: Callable[[], None] = lambda: None,
        on_failure: Callable[[BaseException], None] = lambda _: None,
    ) -> None:
        self._core = core
        self._tick_seconds = tick_seconds
        self._guard = guard
        self._on_change = on_change
        self._on_failure = on_failure
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._revision = -1
        self._ended = False
        self.failure: BaseException | None = None
        self.ready = False
        """Whether the core was ready after what it did last; probes must not wait for it."""
        self._looked = time.monotonic()
        self._thread = threading.Thread(target=self._run, name="monitor-core", daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[CoreT], ResultT]) -> "Future[ResultT]":
        """``call(core)`` in the core's thread."""
        future: Future[ResultT] = Future()

        def job() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                with self._guard():
                    result = call(self._core)
            except BaseException as error:  # noqa: BLE001 - the caller gets it
                future.set_exception(error)
            else:
                future.set_result(result)

        with self._changed:
            if self._ended:
                future.set_exception(self._unavailable())
            else:
                self._jobs.put(job)
        return future

    def call(self, call: Callable[[CoreT], ResultT], timeout: float) -> ResultT:
        """`submit`, and wait.

        Raises:
            MonitorUnavailableError: not done within ``timeout`` seconds, or the thread has ended.
        """
        try:
            return self.submit(call).result(timeout)
        except TimeoutError as error:
            raise MonitorUnavailableError(
                f"the monitor in this process did not answer within {timeout:g} s"
            ) from error

    def tick_now(self) -> None:
        """Look at the disk before the next tick is due; returns at once."""
        self._jobs.put(self._tick)

    def wait_change(self, revision: int, timeout: float) -> int:
        """Wait until the state of some save is newer than ``revision``; the newest one."""
        with self._changed:
            self._changed.wait_for(lambda: self._revision > revision or self._ended, timeout)
            return self._revision

    @property
    def seconds_since_look(self) -> float:
        """Since the disk was last looked at to the end; grows while a volume does not answer."""
        return time.monotonic() - self._looked

    @property
    def alive(self) -> bool:
        """Whether calls are still answered."""
        return self._thread.is_alive() and self.failure is None

    def close(self, timeout: float) -> bool:
        """Do what is queued and one last tick, then end. False if that took too long."""
        self._jobs.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._loop()
        except BaseException as error:  # noqa: BLE001 - kept, logged and reported
            _LOG.critical("the monitor's core failed", exc_info=error)
            self.failure = error
            self._on_failure(error)
        finally:
            self._end()

    def _loop(self) -> None:
        next_tick = time.monotonic()
        while True:
            left = next_tick - time.monotonic()
            if left <= 0:  # first, so that a flood of requests cannot keep the disk waiting
                self._tick()
                next_tick = time.monotonic() + self._tick_seconds
                self._publish()
                continue
            try:
                job = self._jobs.get(timeout=min(left, _POLL_SECONDS) if self._core.busy else left)
            except queue.Empty:
                if self._core.busy:
                    self._poll()
                    self._publish()
                continue
            if job is None:
                self._tick()
                self._guarded(self._core.end)
                self._publish()
                return
            job()
            self._publish()

    def _tick(self) -> None:
        self._guarded(self._core.tick)
        self._looked = time.monotonic()

    def _poll(self) -> None:
        self._guarded(self._core.poll)

    def _guarded(self, look: _Job) -> None:
        try:
            with self._guard():
                look()
        except MonitorError as error:  # put off to the next tick
            _LOG.warning("the disk was not looked at: %s", error)

    def _publish(self) -> None:
        self.ready = self._core.ready
        with self._changed:
            if self._core.revision == self._revision:
                return  # or a long poll would wake itself by asking
            self._revision = self._core.revision
            self._changed.notify_all()
        self._on_change()

    def _end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        while True:
            try:
                job = self._jobs.get_nowait()
            except queue.Empty:
                return
            if job is not None:
                job()  # answered as far as the core still can, so that no caller waits for ever

    def _unavailable(self) -> MonitorUnavailableError:
        cause = f": {self.failure}" if self.failure else ""
        return MonitorUnavailableError(f"the monitor in this process has ended{cause}")
