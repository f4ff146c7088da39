"""Starts the process that outlives this one, and tells it of each part. Never fails a save."""

import logging
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Final

from trainsync.checkpoint.rescue.messages import KeptPart, PartKey, PartTold, encode

logger = logging.getLogger(__name__)

_SECONDS: Final = 30.0
"""For the process to be started, and for what is told to be taken."""

_CLOSE_SECONDS: Final = 2.0

# The child ends before anything is imported: the process belongs to no other that Ray kills.
_CODE: Final = """\
import os, sys
if os.fork():
    os._exit(0)
os.setsid()
sys.path.append(sys.argv[1])
from trainsync.checkpoint.rescue.process import main
main(sys.argv[2:])
"""
_ROOT: Final = Path(__file__).parents[3]


class Rescuer:
    """The process that outlives this one, started with the first part. Thread-safe.

    Where it cannot be started or reached, parts are saved without, and the log says so once.

    Args:
        where: the directory or URL that the saves go to.
        attempt, incarnation: of this process.
        writer: the `SavePlace.writer` of this process.
    """

    def __init__(
        self, where: str | Path, attempt: int, incarnation: str, writer: str | None
    ) -> None:
        self._arguments = [str(where), str(attempt), incarnation, writer or ""]
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self._is_given_up = False

    def began(self, part: PartKey) -> None:
        """The part is being saved."""
        self._tell(PartTold(change="began", part=part))

    def kept(self, part: PartKey, kept: KeptPart) -> None:
        """The part's state is whole in memory."""
        self._tell(PartTold(change="kept", part=part, kept=kept))

    def copied(self, part: PartKey, kept: KeptPart, writer: str) -> None:
        """A copy of another rank's part, of that `SavePlace.writer`, is whole in memory."""
        self._tell(PartTold(change="kept", part=part, kept=kept, copied_from=writer))

    def ended(self, part: PartKey) -> None:
        """The part, or that of which there is a copy, has a receipt, or never will."""
        self._tell(PartTold(change="ended", part=part))

    def close(self) -> None:
        """Let the process end; what it was told and has not ended it still finishes."""
        if self._lock.acquire(timeout=_CLOSE_SECONDS):  # else it is just being started
            try:
                self._give_up()
            finally:
                self._lock.release()

    def _give_up(self) -> None:
        self._is_given_up = True
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _tell(self, told: PartTold) -> None:
        with self._lock:
            if self._is_given_up:
                return
            try:
                if self._socket is None:
                    if told.change == "ended":
                        return
                    self._socket = self._start()
                self._socket.sendall(encode(told))
            except Exception as error:  # noqa: BLE001 - a save needs no rescuer
                self._give_up()
                logger.warning(
                    "if this process is killed, what it has staged is not saved after its death: "
                    "%s: %s",
                    *(type(error).__name__, error),
                )

    def _start(self) -> socket.socket:
        """Start the process; the socket to it.

        Raises:
            OSError, SubprocessError: it cannot be started.
            AttributeError: this is not Linux, so that a death cannot be waited for.
        """
        pidfd = os.pidfd_open(os.getpid())
        ours, theirs = socket.socketpair()
        try:
            ours.settimeout(_SECONDS)
            subprocess.run(
                [
                    *(sys.executable, "-c", _CODE, str(_ROOT)),
                    *(str(theirs.fileno()), str(pidfd), *self._arguments),
                ],
                pass_fds=(theirs.fileno(), pidfd),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                timeout=_SECONDS,
                check=True,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(pidfd)
        return ours
