"""Checks receipts' files, on another thread where reading them all would keep requests waiting."""

from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass

from trainsync.monitor.committer import Stamps
from trainsync.monitor.ledger import SaveKey, Verify
from trainsync.storage.receipts import Receipt


@dataclass(frozen=True)
class Verified:
    """A check that ended: how the files looked, or the error that it raised."""

    key: SaveKey
    receipt: Receipt
    stamps: Stamps
    error: BaseException | None


class Verifier:
    """Runs checks, each receipt once at a time; owned by the core's thread.

    Args:
        check: compares the receipt's files with the disk; raises when they differ.
        executor: where checks run; in the caller's thread when None.
    """

    def __init__(
        self, check: Callable[[SaveKey, Receipt], Stamps], executor: Executor | None
    ) -> None:
        self._check = check
        self._executor = executor
        self._running: dict[tuple[SaveKey, Receipt], Future[Stamps]] = {}

    def start(self, todo: Verify) -> None:
        """Begin a check, unless the same one is running."""
        ticket = (todo.key, todo.receipt)
        if ticket in self._running:
            return
        if self._executor is None:
            future: Future[Stamps] = Future()
            try:
                future.set_result(self._check(todo.key, todo.receipt))
            except Exception as error:  # noqa: BLE001 - handed on by `finished`
                future.set_exception(error)
        else:
            future = self._executor.submit(self._check, todo.key, todo.receipt)
        self._running[ticket] = future

    def finished(self, *, wait: bool = False) -> list[Verified]:
        """Checks that ended since the last call; all of them with ``wait``."""
        done = []
        for (key, receipt), future in list(self._running.items()):
            if wait or future.done():
                error = future.exception()
                stamps = {} if error is not None else future.result()
                done.append(Verified(key, receipt, stamps, error))
                del self._running[key, receipt]
        return done

    @property
    def busy(self) -> bool:
        """Whether a check has been started whose end was not taken yet."""
        return bool(self._running)
