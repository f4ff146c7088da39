"""Chains between threads of one process, for tests."""

import queue
import socket
import threading
from collections.abc import Callable
from typing import Any

from trainsync.weights.transports.chain.chain import Chain

SECONDS = 20.0


def chain(members: int, bucket_seconds: float = SECONDS) -> list[Chain]:
    """A connected `Chain` for each member, in order."""
    pairs = [socket.socketpair() for _ in range(members - 1)]
    befores = [None, *(far for _, far in pairs)]
    afters = [*(near for near, _ in pairs), None]
    return [
        Chain("c", before, after, bucket_seconds)
        for before, after in zip(befores, afters, strict=True)
    ]


def beside(call: Callable[[], Any]) -> "queue.SimpleQueue[Any]":
    """Run ``call()`` in a thread; returns a queue for its result or error."""
    outcome: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def work() -> None:
        try:
            outcome.put(call())
        except Exception as error:  # noqa: BLE001 - looked at by the test
            outcome.put(error)

    threading.Thread(target=work, daemon=True).start()
    return outcome
