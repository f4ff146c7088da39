"""Copies what this process keeps to its partner, behind training."""

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from trainsync.checkpoint.memory.kept import SealedFile
from trainsync.checkpoint.memory.neighbour import wire
from trainsync.checkpoint.memory.neighbour.pace import Pace
from trainsync.checkpoint.memory.neighbour.roster import CopyHolder
from trainsync.checkpoint.memory.neighbour.wire import NeighbourError
from trainsync.checkpoint.memory.reuse import open_whole
from trainsync.failpoints import failpoint
from trainsync.storage import digest
from trainsync.storage.errors import StorageError

logger = logging.getLogger(__name__)

_FIRST_LOOK: Final = 0.2  # seconds between two looks for a partner, which are then fewer
_LONGEST_LOOK: Final = 30.0
_ALONE: Final = 5.0  # when that is so much, a line says so
_MOST_TRIED: Final = 2  # partners for one file


@dataclass(frozen=True)
class CopyStats:
    """Counters of the copies that this process has made with its partner."""

    copies: int = 0
    bytes: int = 0
    seconds: float = 0.0
    superseded: int = 0  # files that a newer one of the same part overtook
    failures: int = 0


class Copier:
    """One thread that sends the newest file of each part. It is a daemon, begun by the first file.

    Args:
        key: of the run.
        find: looks up who may take the copies, the best first.
        owner: attempt and incarnation of this process.
    """

    def __init__(
        self,
        key: bytes,
        find: Callable[[], list[CopyHolder]],
        owner: tuple[int, str],
        pace: Pace | None = None,
    ) -> None:
        self._key = key
        self._find = find
        self._owner = owner
        self._pace = pace or Pace()
        self._changed = threading.Condition()  # guards what follows
        self._waiting: dict[str, SealedFile] = {}  # by part
        self._stats = CopyStats()
        self._busy = False
        self._closed = False
        self._thread: threading.Thread | None = None
        self._told: set[str] = set()

    @property
    def stats(self) -> CopyStats:
        """A consistent copy of the counters."""
        with self._changed:
            return self._stats

    def offer(self, file: SealedFile) -> None:
        """Copy the file soon, in place of an older one of its part that still waits."""
        part = str(file.participant)
        with self._changed:
            if self._closed:
                return
            self._pace.kept(part, file.bytes)
            if self._waiting.pop(part, None) is not None:
                self._stats = replace(self._stats, superseded=self._stats.superseded + 1)
            self._waiting[part] = file
            if self._thread is None:
                thread = threading.Thread(
                    target=self._work, name="trainsync-neighbour", daemon=True
                )
                thread.start()
                self._thread = thread
            self._changed.notify_all()

    def wait(self, timeout: float) -> bool:
        """Wait until nothing is left to copy; False if ``timeout`` seconds were not enough."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and not self._busy, timeout)

    def close(self) -> None:
        """Copy no more; what is being copied ends with its next piece."""
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify_all()

    def _work(self) -> None:
        try:
            while (following := self._next()) is not None:
                self._copy(*following)
        except Exception:
            logger.exception("no more shards are copied to a neighbour")
            self.close()
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _next(self) -> tuple[SealedFile, list[CopyHolder]] | None:
        """The file to copy now, and who may take it; None when closed. Waits for a partner, too."""
        look = _FIRST_LOOK
        with self._changed:
            self._busy = False
            self._changed.notify_all()
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if self._closed:
                    return None
            if partners := self._partners():
                with self._changed:
                    if self._closed:
                        return None
                    self._busy = True
                    return self._waiting.pop(next(iter(self._waiting))), partners
            if look > _ALONE:
                self._say("alone", "no other node or pod takes copies of kept shards so far")
            with self._changed:
                self._changed.wait_for(lambda: self._closed, look)
            look = min(2 * look, _LONGEST_LOOK)

    def _partners(self) -> list[CopyHolder]:
        try:
            return self._find()
        except (OSError, StorageError) as error:
            self._say("roster", f"the neighbours cannot be looked up: {error}")
            return []

    def _copy(self, file: SealedFile, partners: list[CopyHolder]) -> None:
        began = time.monotonic()
        causes = []
        for partner in partners[:_MOST_TRIED]:
            try:
                if not self._send(file, partner):
                    return  # it was dropped: nothing needs it any more
            except NeighbourError as error:
                if self._closed:
                    return
                causes.append(f"rank {partner.rank} on {partner.node}: {error}")
                continue
            seconds = time.monotonic() - began
            with self._changed:
                self._stats = replace(
                    self._stats,
                    copies=self._stats.copies + 1,
                    bytes=self._stats.bytes + file.bytes,
                    seconds=self._stats.seconds + seconds,
                )
            return
        with self._changed:
            self._stats = replace(self._stats, failures=self._stats.failures + 1)
        self._say(
            "failed",
            f"{file.participant} of step {file.step} has no copy with a neighbour: "
            + "; ".join(causes),
        )

    def _send(self, file: SealedFile, partner: CopyHolder) -> bool:
        """False when there is nothing to send any more.

        Raises:
            NeighbourError: the partner does not have it.
        """
        try:
            opened = os.fdopen(open_whole(file.path), "rb")
        except FileNotFoundError:  # dropped: it is not needed
            return False
        except OSError as error:
            raise NeighbourError(f"{file.path} cannot be read: {error}") from error
        about = self._about(file)
        if len(about) > wire.LONGEST_ABOUT:
            self._say(
                "about",
                f"a copy of {file.participant} serves loads alone: what else its part needs has "
                f"{len(about)} bytes, more than {wire.LONGEST_ABOUT}",
            )
            about = b""
        request = {
            "want": "put",
            "attempt": self._owner[0],
            "incarnation": self._owner[1],
            "step": file.step,
            "component": file.participant.component,
            "rank": file.participant.rank,
            "bytes": file.bytes,
            "digest": file.digest,
            "about": len(about),
            "about_digest": digest.manifest_digest(about),
        }
        with opened, wire.connect((partner.address, partner.port)) as connection:
            failpoint("neighbour.asking")
            wire.ask(connection, self._key, request)
            wire.send_file(connection, opened, file.bytes, self._sent)
            wire.send_bytes(connection, about)
            wire.receive(connection, "kept")
            failpoint("neighbour.copied")
        return True

    def _about(self, file: SealedFile) -> bytes:
        try:
            return file.describe(file)
        except Exception as error:  # noqa: BLE001 - a load needs the file alone
            self._say("described", f"a copy of {file.participant} serves loads alone: {error!r}")
            return b""

    def _sent(self, count: int) -> None:
        failpoint("neighbour.sending")
        with self._changed:
            if self._closed:
                raise NeighbourError("this process copies no more")
        self._pace.sent(count)

    def _say(self, kind: str, text: str) -> None:
        """Once for each kind with weight; the volume has all that is committed."""
        is_new = kind not in self._told
        self._told.add(kind)
        level = logging.WARNING if is_new and kind != "alone" else logging.DEBUG
        logger.log(logging.INFO if is_new and kind == "alone" else level, "%s", text)
