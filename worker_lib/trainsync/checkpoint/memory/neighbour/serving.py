"""A server in a rank's process: gives files that lie in its pod's memory, and takes copies."""

import logging
import os
import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Final

from trainsync.checkpoint.memory.kept import KeptShards, SealedFile
from trainsync.checkpoint.memory.neighbour.roster import own_address
from trainsync.checkpoint.memory.neighbour.wire import (
    LONGEST_ABOUT,
    Caller,
    Frame,
    NeighbourError,
    prepare,
    receive_file,
    send,
    send_file,
)
from trainsync.checkpoint.memory.place import KeptName, MemoryPlace
from trainsync.checkpoint.memory.reuse import open_whole
from trainsync.failpoints import failpoint
from trainsync.storage import digest
from trainsync.storage.saves.receipts import Participant

logger = logging.getLogger(__name__)

_MOST_AT_ONCE: Final = 16
_LOOK_SECONDS: Final = 0.5  # between looks whether it is closed


def places_of(place: MemoryPlace) -> list[MemoryPlace]:
    """Where files of the run lie in this pod: its own, and its guests'."""
    return [place] if place.guests is None else [place, place.guests]


def whole_files(places: Iterable[MemoryPlace]) -> dict[str, tuple[MemoryPlace, KeptName]]:
    """Whole files in these places, by digest.

    Raises:
        OSError: a place is not this user's alone.
    """
    return {
        kept.digest: (place, kept)
        for place in places
        for kept in place.files()
        if kept.digest is not None
    }


class MemoryServer:
    """Answers other processes of the run until it is closed. Its threads are daemons.

    Args:
        key: of the run.
        places: files in these are given, by their digest.
        guests: takes copies; None: none are taken.
        attempt, incarnation: copies of another attempt are refused.
        taken: gets each copy that was taken, with what was told beside it.

    Raises:
        OSError: no port can be had.
    """

    def __init__(
        self,
        key: bytes,
        places: Sequence[MemoryPlace],
        guests: KeptShards | None = None,
        attempt: int | None = None,
        incarnation: str | None = None,
        taken: Callable[[SealedFile], None] = lambda _: None,
    ) -> None:
        self._key = key
        self._taken = taken
        self._places = list(places)
        self._guests = guests
        self._owner = (attempt, incarnation)
        self._closed = threading.Event()
        self._room = threading.BoundedSemaphore(_MOST_AT_ONCE)
        self._lock = threading.Lock()  # guards what follows
        self.taken_bytes = 0
        """Of copies that were taken."""
        host = own_address()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self._listener.settimeout(_LOOK_SECONDS)
        self.address: Final = (host, int(self._listener.getsockname()[1]))
        thread = threading.Thread(target=self._accept, name="trainsync-memory-server", daemon=True)
        try:
            thread.start()
        except RuntimeError:
            self._listener.close()
            raise

    def close(self) -> None:
        """Take no more requests; those that go on may end."""
        self._closed.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with self._listener:
            while not self._closed.is_set():
                try:
                    connection, _ = self._listener.accept()
                except TimeoutError:
                    continue
                except OSError as error:
                    if not self._closed.is_set():  # such as: no descriptor is left
                        logger.warning("a request for kept shards failed: %s", error)
                        self._closed.wait(_LOOK_SECONDS)
                    continue
                if not self._room.acquire(blocking=False):
                    connection.close()
                    continue
                try:
                    threading.Thread(
                        target=self._answer,
                        args=(connection,),
                        name="trainsync-memory",
                        daemon=True,
                    ).start()
                except RuntimeError as error:  # no more threads
                    logger.warning("a request for kept shards is refused: %s", error)
                    connection.close()
                    self._room.release()

    def _answer(self, connection: socket.socket) -> None:
        try:
            with connection:
                prepare(connection)
                caller = Caller(connection, self._key)
                request = caller.request()
                if request.get("want") == "get":
                    self._give(connection, caller, str(request.get("digest")))
                elif request.get("want") == "put" and self._guests is not None:
                    self._take(connection, caller, request, self._guests)
                else:
                    caller.refuse(f"{request.get('want')!r} is not done here")
        except (NeighbourError, OSError) as error:
            logger.info("a request of another rank for kept shards ended: %s", error)
        except Exception:
            logger.exception("a request of another rank for kept shards failed")
        finally:
            self._room.release()

    def _is_here(self, step: int, wanted: str) -> bool:
        """Whether a file of that digest lies here that stays as long as the step is needed.

        Two steps may have equal bytes; the older step's file goes when the newer one commits.
        """
        return any(
            kept.digest == wanted and kept.step == step
            for place in self._places
            for kept in place.files()
        )

    def _give(self, connection: socket.socket, caller: Caller, wanted: str) -> None:
        found = whole_files(self._places).get(wanted)
        try:
            if found is None:
                raise FileNotFoundError(f"no file of digest {wanted} is here")
            fd = open_whole(found[0].path(found[1]))
        except FileNotFoundError as error:  # it may have been dropped meanwhile
            caller.refuse(str(error))
            return
        with os.fdopen(fd, "rb") as file:
            size = os.fstat(fd).st_size
            failpoint("neighbour.giving")
            caller.welcome(bytes=size)
            send_file(connection, file, size, lambda _: failpoint("neighbour.given"))

    def _take(
        self, connection: socket.socket, caller: Caller, request: Frame, guests: KeptShards
    ) -> None:
        owner = (request.get("attempt"), request.get("incarnation"))
        if owner != self._owner:
            caller.refuse(f"it is of attempt {owner[0]}, and this process of {self._owner[0]}")
            return
        try:
            step, size = int(request["step"]), int(request["bytes"])
            more, told_digest = int(request["about"]), str(request["about_digest"])
            participant = Participant(str(request["component"]), int(request["rank"]))
            wanted = str(request["digest"])
        except (KeyError, TypeError, ValueError) as error:
            caller.refuse(f"the request cannot be read: {error!r}")
            return
        if not 0 <= more <= LONGEST_ABOUT:
            caller.refuse(f"{more} bytes would follow the file, more than {LONGEST_ABOUT}")
            return
        if self._is_here(step, wanted):
            caller.refuse("it is here already")
            return
        file = guests.begin(step, participant, size)
        if file is None:
            caller.refuse("there is no room for it")
            return
        try:
            caller.welcome()
            hasher = digest.new_hasher()

            def take(piece: memoryview) -> None:
                failpoint("neighbour.taking")
                hasher.update(piece)
                file.write(piece)

            receive_file(connection, size, take)
            about = bytearray()
            receive_file(connection, more, about.extend)
            found = digest.format_digest(hasher)
            cause = ""
            if found != wanted:
                cause = f"its digest is {found}, expected {wanted}"
            elif digest.manifest_digest(bytes(about)) != told_digest:
                cause = "what is told beside it came damaged"
            elif file.whole_bytes != size:
                cause = "there is no room for it"
            if cause:
                file.discard()  # before the sender may try another
                caller.refuse(cause)
                return
            sealed = file.seal(wanted, lambda _: bytes(about))
            if sealed is None:
                caller.refuse("it could not be kept")
                return
            self._taken(sealed)
            with self._lock:
                self.taken_bytes += size
            send(connection, {"kind": "kept"})
        finally:
            file.discard()
