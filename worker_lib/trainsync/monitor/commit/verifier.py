"""Checks receipts' files, on another thread where reading them all would keep requests waiting."""

import concurrent.futures
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass

from trainsync.monitor.commit.committer import Stamps
from trainsync.monitor.ledger.decisions import VerifyReceipt
from trainsync.monitor.ledger.saves import SaveKey
from trainsync.storage.saves.receipts import Participant, Receipt


@dataclass(frozen=True)
class Verified:
    """A check that ended: how the files looked, or the error that it raised."""

    key: SaveKey
    receipt: Receipt
    stamps: Stamps
    error: BaseException | None


_Ticket = tuple[SaveKey, Participant]


class Verifier:
    """Runs checks, one of each participant at a time; owned by the core's thread.

    Args:
        check: compares the receipt's files with the disk; raises when they differ.
        executor: where checks run; in the caller's thread when None.
    """

    def __init__(
        self, check: Callable[[SaveKey, Receipt], Stamps], executor: Executor | None
    ) -> None:
        self._check = check
        self._executor = executor
        self._running: dict[_Ticket, tuple[Receipt, Future[Stamps]]] = {}
        self._ended: deque[_Ticket] = deque()  # appended to by any thread

    def start(self, todo: VerifyReceipt) -> bool:
        """Begin a check; False while another one of the same participant has not ended."""
        ticket = (todo.key, todo.receipt.participant)
        if ticket in self._running:
            return False
        if self._executor is None:
            future: Future[Stamps] = Future()
            try:
                future.set_result(self._check(todo.key, todo.receipt))
            except Exception as error:  # noqa: BLE001 - handed on by `finished`
                future.set_exception(error)
        else:
            future = self._executor.submit(self._check, todo.key, todo.receipt)
        self._running[ticket] = (todo.receipt, future)
        future.add_done_callback(lambda _: self._ended.append(ticket))
        return True

    def finished(self, *, wait: bool = False) -> list[Verified]:
        """Checks that ended since the last call; all of them with ``wait``."""
        if wait:
            concurrent.futures.wait([future for _, future in self._running.values()])
        tickets = list(self._running) if wait else []
        while self._ended:
            tickets.append(self._ended.popleft())
        done = []
        for ticket in tickets:
            # A callback may come late, when its check was taken and another one was begun.
            if ticket not in self._running or not self._running[ticket][1].done():
                continue
            receipt, future = self._running.pop(ticket)
            error = future.exception()
            stamps = {} if error is not None else future.result()
            done.append(Verified(ticket[0], receipt, stamps, error))
        return done

    @property
    def busy(self) -> bool:
        """Whether a check has been started whose end was not taken yet."""
        return bool(self._running)
