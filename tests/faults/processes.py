"""Processes of a trial: forked, controlled over a pipe, really killed, and always cleaned up."""

import ctypes
import faulthandler
import logging
import os
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, Final

SECONDS: Final = 60.0
"""Limit of every wait in a trial; a longer wait is a hang."""

_STACKS_SECONDS: Final = 0.5
_PR_SET_PDEATHSIG: Final = 1
_LIBC: Final = ctypes.CDLL(None, use_errno=True)


class BrokenError(AssertionError):
    """A promise is broken; the message names the promise."""


class HangError(BrokenError):
    """A process stands still; the cause may be in another one, so all of them show their stacks."""


class Line:
    """A child's end of the pipe."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def say(self, what: str, value: Any = None) -> None:
        """Send a message to the conductor."""
        self._connection.send((what, value))

    def hear(self, seconds: float = SECONDS) -> str:
        """The conductor's next command."""
        if not self._connection.poll(seconds):
            raise TimeoutError(f"the conductor said nothing for {seconds:g} s")
        word: str = self._connection.recv()
        return word

    def is_told(self) -> bool:
        """Whether `hear` returns at once."""
        return self._connection.poll(0)


class Child:
    """A forked process that runs ``function(line, *arguments)``.

    Args:
        look: called repeatedly while the conductor waits for the child.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., None],
        *arguments: Any,
        look: Callable[[], None] = lambda: None,
    ) -> None:
        self.name = name
        self.status: int | None = None
        self._look = look
        ours, theirs = Pipe()
        self.pid = os.fork()
        if self.pid == 0:
            ours.close()
            _run(Line(theirs), function, arguments)
        theirs.close()
        self._connection = ours

    def expect(self, what: str, seconds: float = SECONDS) -> Any:
        """The value of the child's next message, which must be named ``what``."""
        said, value = self.listen(seconds)
        if said != what:
            raise BrokenError(f"{self.name}: expected {what!r}, it said {said!r}: {value}")
        return value

    def listen(self, seconds: float = SECONDS) -> tuple[str, Any]:
        """The child's next message; ``("ended", status)`` if the child ended without one."""
        end = time.monotonic() + seconds
        while not self._connection.poll(0.005):
            self._look()
            if time.monotonic() > end:
                raise HangError(f"{self.name} said nothing for {seconds:g} s: it hangs")
        try:
            message: tuple[str, Any] = self._connection.recv()
        except (EOFError, ConnectionResetError):
            return "ended", self.wait(seconds)
        return message

    def speaks(self, seconds: float = 0.0) -> bool:
        """Whether `listen` returns at once: the child has sent a message or has ended."""
        self._look()
        return self._connection.poll(seconds)

    def tell(self, word: object) -> None:
        """Send a command; ignored if the child is dead."""
        try:
            self._connection.send(word)
        except (BrokenPipeError, ConnectionResetError):
            return

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, unless the child has ended."""
        if self.status is None:
            os.kill(self.pid, number)

    def wait(self, seconds: float = SECONDS) -> int:
        """The child's exit code, negative for a signal."""
        end = time.monotonic() + seconds
        while self.status is None:
            self._reap(os.WNOHANG)
            if self.status is None:
                self._look()
                if time.monotonic() > end:
                    raise HangError(f"{self.name} did not end within {seconds:g} s")
                time.sleep(0.002)
        return self.status

    def wait_stopped(self, seconds: float = SECONDS) -> bool:
        """Wait until the child is stopped (SIGSTOP); False if it ended instead."""
        end = time.monotonic() + seconds
        while True:
            found, status = os.waitpid(self.pid, os.WNOHANG | os.WUNTRACED)
            if found and os.WIFSTOPPED(status):
                return True
            if found:
                self.status = os.waitstatus_to_exitcode(status)
                return False
            self._look()
            if time.monotonic() > end:
                raise BrokenError(f"{self.name} was not stopped within {seconds:g} s")
            time.sleep(0.002)

    def note_stacks(self) -> None:
        """Let a living child write the stacks of its threads to the trial's log."""
        self._reap(os.WNOHANG)
        if self.status is not None:
            return
        logging.getLogger(__name__).error("stacks of %s, process %d:", self.name, self.pid)
        self.signal(signal.SIGUSR1)
        time.sleep(_STACKS_SECONDS)  # no signal reports the end of the dump

    def kill(self) -> None:
        """Kill the child now."""
        if self.status is None:
            os.kill(self.pid, signal.SIGKILL)
            while self.status is None:
                self._reap(0)
        if not self._connection.closed:
            self._connection.close()

    def _reap(self, options: int) -> None:
        if self.status is not None:
            return
        found, status = os.waitpid(self.pid, options)
        if found:
            self.status = os.waitstatus_to_exitcode(status)


def first_to_speak(children: Sequence[Child], seconds: float = SECONDS) -> Child:
    """The first child that sends a message or ends; of several, the first in ``children``."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for child in children:
            if child.speaks(0.003):
                return child
    names = " and ".join(child.name for child in children)
    raise HangError(f"{names} said nothing for {seconds:g} s: they hang")


def _run(line: Line, function: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    die_with_parent()
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler):
            faulthandler.register(signal.SIGUSR1, handler.stream)
    code = 1
    try:
        function(line, *arguments)
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:  # noqa: BLE001 - the conductor is told
        try:
            line.say("error", traceback.format_exc())
        except OSError:
            code = 2  # the conductor has closed the pipe
    os._exit(code)


def die_with_parent() -> None:
    """Let the kernel kill this process when the conductor dies."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def become_nobody() -> None:
    """Drop root permanently in this process: modes of a directory do not stop root."""
    os.setgroups([])
    os.setgid(65534)
    os.setuid(65534)
    die_with_parent()  # the change of user has reset this
