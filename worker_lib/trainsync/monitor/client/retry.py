"""Bounded retries with jittered exponential back-off, for calls to the monitor."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class RetryPolicy:
    """At most ``attempts`` tries, and no new one after ``deadline_seconds``.

    The wait before the n-th retry is drawn evenly from half to all of
    ``first_wait_seconds * 2**n``, at most ``longest_wait_seconds``.
    """

    attempts: int = 30  # the deadline comes first, also when a refused connection costs no time
    deadline_seconds: float = 60.0
    first_wait_seconds: float = 0.2
    longest_wait_seconds: float = 5.0
    sleep: Callable[[float], None] = field(default=time.sleep)
    clock: Callable[[], float] = field(default=time.monotonic)
    random: Callable[[], float] = field(default=random.random)

    def run(
        self,
        call: Callable[[], ResultT],
        retry_on: tuple[type[Exception], ...],
    ) -> ResultT:
        """``call()``, again while it raises one of ``retry_on``; the last error is raised."""
        end = self.clock() + self.deadline_seconds
        wait = self.first_wait_seconds
        for left in reversed(range(self.attempts)):
            try:
                return call()
            except retry_on:
                pause = min(wait, self.longest_wait_seconds) * (0.5 + self.random() / 2)
                if left == 0 or self.clock() + pause > end:
                    raise
            self.sleep(pause)
            wait *= 2
        raise AssertionError(f"attempts is {self.attempts}, expected at least 1")
