"""Faults in a process of a broadcast, at a phase chosen by a test."""

import signal
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

from tests.distributed.weights.broadcast.broadcast_network import Space

CUT = -1  # fault of an explorer besides signals: unplug its cable


@dataclass
class Trap:
    """Stops, kills or cuts off the process the ``count``-th time it reaches ``phase``, once armed.

    Args:
        space: the process's namespace, if it can be cut off.
    """

    phase: str = ""
    number: int = 0
    count: int = 0
    reached: Counter[str] = field(default_factory=Counter)
    space: Space | None = None

    def __call__(self, phase: str) -> None:
        self.reached[phase] += 1
        if phase != self.phase:
            return
        self.count -= 1
        if self.count <= 0:
            self.phase = ""
            if self.number == CUT:
                assert self.space is not None
                self.space.cut()
                return
            # To this thread: a signal to the process could arrive later.
            signal.pthread_kill(threading.get_ident(), self.number)

    def arm(self, phase: str, number: int, count: int) -> None:
        """``number`` is the signal, or `CUT`."""
        if phase == "acknowledged":
            # The trainer is told before: the version of before may be about to reach it.
            end = time.monotonic() + 20
            while self.reached["acknowledged"] < self.reached["flipped"]:
                assert time.monotonic() < end, "the last version was not acknowledged"
                time.sleep(0.001)  # lets the receiving thread run
        self.phase, self.number, self.count = phase, number, count
