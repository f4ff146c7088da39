"""Write permits: which processes may write at the same time, by ``checkpoint.saveStrategy``.

A permit limits load on the volume and nothing else: a commit is right whichever processes wrote at
the same time. So a permit that is lost amid a write (its holder could not renew it) is logged and
counted, and the write goes on.
"""

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from trainsync.api.protocol import PermitAnswer, PermitRequest
from trainsync.api.spec import SaveStrategy
from trainsync.checkpoint.errors import PermitTimeoutError
from trainsync.checkpoint.save.registration import AWAY
from trainsync.monitor.client.base import PermitClient
from trainsync.monitor.errors import MonitorError
from trainsync.storage import locks
from trainsync.storage.errors import LockTimeoutError

PERMIT_SECONDS: Final = 1800.0
"""Longest wait for a permit: a save that is not complete by then is aborted by the monitor."""

logger = logging.getLogger(__name__)
_ONE_WAIT_SECONDS: Final = 20.0
_MAX_LABEL: Final = 200


class WritePermits(Protocol):
    """Asked for one permit around each background write."""

    def hold(self, label: str) -> AbstractContextManager[None]:
        """A context in which this process may write; ``label`` names the save for people.

        Entering blocks, at most a deadline that the implementation states. It may be held several
        times at once, by threads of one process.

        Raises:
            PermitTimeoutError: on entering: not granted in time; names the holders.
        """
        ...


class MonitorPermits:
    """Permits that the run's monitor grants, first come first served.

    Args:
        scope: of the next write: those of equal scope may write together (see `scope_of`).
        node: for people: where this process runs.
        timeout: longest wait in seconds.
        retry: seconds before a monitor that is away is asked again.
        release: seconds that the end of a write waits at most for the release of its permit.
    """

    def __init__(
        self,
        client: PermitClient,
        scope: Callable[[], str],
        *,
        node: str = "",
        timeout: float = PERMIT_SECONDS,
        retry: float = 1.0,
        release: float = 2.0,
    ) -> None:
        self._client = client
        self._retry_seconds = retry
        self._release_seconds = release
        self._scope = scope
        self._node = node
        self._timeout = timeout
        self._lock = threading.Lock()
        self._lost = 0

    @property
    def lost(self) -> int:
        """Permits that ended before their write did."""
        with self._lock:
            return self._lost

    @contextmanager
    def hold(self, label: str) -> Iterator[None]:
        """See `WritePermits`. Raises `MonitorError`, too: this attempt is fenced."""
        label = (f"{label} on {self._node}" if self._node else label)[:_MAX_LABEL]
        request = PermitRequest(holder=secrets.token_hex(8), scope=self._scope(), label=label)
        try:
            answer = self._wait(request)
        except BaseException:
            self._release(request)
            raise
        ended = threading.Event()
        keeper = threading.Thread(
            target=self._keep,
            args=(request.model_copy(update={"held": True}), answer.ttl_seconds / 3, ended),
            name=f"permit-{label}",
            daemon=True,
        )
        try:
            keeper.start()
        except RuntimeError:  # the system has no thread left
            self._release(request)
            raise
        try:
            yield
        finally:
            ended.set()
            # No longer: it may be asking a monitor that is away, and the receipt is not to wait
            # for that. The permit ends by itself then.
            keeper.join(self._release_seconds)

    def _wait(self, request: PermitRequest) -> PermitAnswer:
        end = time.monotonic() + self._timeout
        last = "the monitor was not asked"
        while (left := end - time.monotonic()) > 0:
            try:
                answer = self._client.write_permit(request, min(left, _ONE_WAIT_SECONDS))
            except AWAY as error:
                last = str(error)
                time.sleep(min(left, self._retry_seconds))
                continue
            if answer.granted:
                return answer
            holders = ", ".join(answer.held_by) or "no writer: the monitor was restarted"
            last = f"held by {holders}; {answer.ahead} more asked earlier"
        raise PermitTimeoutError(
            f"{request.label}: no permit to write within {self._timeout:g} s, as "
            f"checkpoint.saveStrategy demands: {last}"
        )

    def _keep(self, request: PermitRequest, every: float, ended: threading.Event) -> None:
        """Renew until ``ended``, then release, so that no renewal comes after the release."""
        self._renew(request, every, ended)
        ended.wait()
        self._release(request)

    def _renew(self, request: PermitRequest, every: float, ended: threading.Event) -> None:
        while not ended.wait(every):
            try:
                lost = not self._client.write_permit(request, 0.0).granted
            except AWAY as error:
                logger.warning("%s: its permit was not renewed: %s", request.label, error)
                continue
            except MonitorError as error:
                logger.warning("%s: its permit is refused: %s", request.label, error)
                lost = True
            if lost:
                logger.warning("%s: lost its permit, and writes on", request.label)
                with self._lock:
                    self._lost += 1
                return

    def _release(self, request: PermitRequest) -> None:
        try:
            self._client.release_permit(request.holder)
        except MonitorError as error:
            logger.warning("%s: its permit ends by itself: %s", request.label, error)


def scope_of(strategy: SaveStrategy, node: str) -> Callable[[], str]:
    """Scopes of this process's writes, for `MonitorPermits`."""
    process = f"{node}/{os.getpid()}/{secrets.token_hex(4)}"
    if strategy is SaveStrategy.SINGLE_NODE:
        return lambda: node
    if strategy is SaveStrategy.SINGLE_PROCESS:
        return lambda: process
    if strategy is SaveStrategy.SINGLE_THREAD:
        return lambda: f"{process}/{secrets.token_hex(4)}"
    raise ValueError(f"strategy {strategy.value} needs no permits")


@dataclass
class _Shared:
    """A file lock that the threads of this process hold together."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    holders: int = 0
    stack: ExitStack = field(default_factory=ExitStack)


_SHARED: dict[tuple[int, Path], _Shared] = {}
_SHARED_LOCK = threading.Lock()


class FilePermits:
    """Permits by a lock file, for the processes of a local run, which share one host.

    The lock dies with its holder. Waiting processes are not served in order. `single_node`
    restricts nothing here. On a volume without file locks nothing is restricted either, which is
    logged.
    """

    def __init__(
        self, path: Path, strategy: SaveStrategy, *, timeout: float = PERMIT_SECONDS
    ) -> None:
        self._path = path
        self._strategy = strategy
        self._timeout = timeout

    @contextmanager
    def hold(self, label: str) -> Iterator[None]:
        """See `WritePermits`. Raises `OSError`, too: the lock file cannot be opened."""
        note = f"{label[:_MAX_LABEL]} (process {os.getpid()})"
        with ExitStack() as stack:
            try:
                if self._strategy is SaveStrategy.SINGLE_THREAD:
                    stack.enter_context(locks.exclusive(self._path, self._timeout, note))
                elif self._strategy is SaveStrategy.SINGLE_PROCESS:
                    self._join(note)
                    stack.callback(self._leave)
            except LockTimeoutError as error:
                raise PermitTimeoutError(
                    f"{label}: no permit to write, as checkpoint.saveStrategy demands: {error}"
                ) from error
            yield

    def _join(self, note: str) -> None:
        shared = self._shared()
        # The first one waits for the other processes; the rest of this one waits for the first.
        if not shared.lock.acquire(timeout=self._timeout):
            raise LockTimeoutError(f"{self._path}: not free within {self._timeout:g} s")
        try:
            if shared.holders == 0:
                shared.stack.enter_context(locks.exclusive(self._path, self._timeout, note))
            shared.holders += 1
        finally:
            shared.lock.release()

    def _leave(self) -> None:
        shared = self._shared()
        with shared.lock:
            shared.holders -= 1
            if shared.holders == 0:
                shared.stack.close()

    def _shared(self) -> _Shared:
        # By process, because a forked child has its parent's memory but holds nothing.
        with _SHARED_LOCK:
            return _SHARED.setdefault((os.getpid(), self._path.resolve()), _Shared())
