"""The one thread that every relay runs: it asks, passes on the answer, and asks again."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from trainsync.monitor.errors import FencedError
from trainsync.weights import threads

logger = logging.getLogger(__name__)

RETRY_SECONDS: Final = 0.5


class Relay:
    """Passes on one answer at a time until `close`; a subclass says what, in `_pass_on`.

    What fails is logged and counted, and is asked again. The thread ends when the attempt is over
    (`FencedError`) or Ray is gone. A subclass sets its own attributes before it calls this
    ``__init__``, which starts the thread.

    Args:
        name: of the thread.
        undone: what does not happen while this fails, for the log: "commits are not announced".
        retry_seconds: between a failure and the next question.

    Attributes:
        failed: how many questions and answers failed.
        last_error: of the last one that did.
    """

    def __init__(self, name: str, undone: str, retry_seconds: float = RETRY_SECONDS) -> None:
        self._undone = undone
        self._retry_seconds = retry_seconds
        self._closing = threading.Event()
        self._passing_on = threading.Lock()  # held while an answer is passed on
        self.failed = 0
        self.last_error: BaseException | None = None
        self._thread = threads.start(name, self._run, self._closing)

    def close(self, timeout: float) -> bool:
        """Pass on nothing from now on. False if that goes on for ``timeout`` seconds.

        A question that is being asked is not waited for: its answer is not used.
        """
        self._closing.set()
        if not self._passing_on.acquire(timeout=timeout):
            return False
        self._passing_on.release()
        return True

    @property
    def running(self) -> bool:
        """Whether the thread goes on."""
        return self._thread.is_alive()

    def _pass_on(self) -> None:
        """Ask once, and pass on the answer."""
        raise NotImplementedError

    def _end(self) -> None:
        """What is still to be done when `close` was called, in the thread."""

    @contextmanager
    def _while_open(self) -> Iterator[bool]:
        """Around what `close` waits for; gives False when it was called already."""
        with self._passing_on:
            yield not self._closing.is_set()

    def _run(self) -> None:
        while not self._closing.is_set() and threads.ray_is_there():
            try:
                self._pass_on()
            except FencedError as error:
                self._note(error, f"{self._undone} any more")
                return
            except Exception as error:  # noqa: BLE001 - whatever it is, training goes on
                if not self._closing.is_set():
                    self._note(error, f"{self._undone} for now")
                    self._closing.wait(self._retry_seconds)
        if threads.ray_is_there():
            self._end()

    def _note(self, error: BaseException, what: str) -> None:
        error = getattr(error, "cause", None) or error  # without Ray's traceback of the actor
        self.failed += 1
        self.last_error = error
        logger.warning("%s: %s", what, error)
