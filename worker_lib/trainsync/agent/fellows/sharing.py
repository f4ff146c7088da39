"""Gives held versions to fellows that know the run's key.

A connection carries one file. Each begins with the handshake of a broadcast's control line
(`trainsync.weights.transports.broadcast.link`), with the token HMAC-SHA256(the monitor's key,
"chain fellows") and ``hello {version, file, offset}``, a place in the manifest's files; after the
welcome come 0x06 and the file's bytes without frames. An object of a store is a version of one
file, whose path is the object's key.
"""

import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Final

from trainsync.agent.fellows.holding import Holding, HoldingClosedError, open_for_reading
from trainsync.failpoints import failpoint
from trainsync.weights.buckets.layout import PIECE_BYTES
from trainsync.weights.errors import MemberLostError
from trainsync.weights.transports.broadcast.link import Challenge, Link, NotProvenError
from trainsync.weights.transports.chain.chain import chain_token

_LOG = logging.getLogger(__name__)
_MOST_FELLOWS: Final = 16  # connections at once; each has a thread
_MEET_SECONDS: Final = 5.0
NAME: Final = "fellows"
GO: Final = b"\x06"
"""A fellow's byte before the bytes of the file, which must not follow a frame at once."""


class FellowServer:
    """Listens until `close`; any thread.

    Args:
        host: address of this host.
        key: gives the run's present key; None: not known, all are refused.
        wait: seconds for a version that this agent does not hold yet, or for its next bytes.

    Raises:
        OSError: the address cannot be listened on.
    """

    def __init__(self, host: str, key: Callable[[], str | None], wait: float) -> None:
        self._key = key
        self._wait = wait
        self._changed = threading.Condition()
        self._holdings: tuple[Holding, ...] = ()
        self._expected = True
        self._places = threading.BoundedSemaphore(_MOST_FELLOWS)
        self._closed = False
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        port = self._listener.getsockname()[1]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        threading.Thread(target=self._listen, name="trainsync-fellows", daemon=True).start()

    def hold(self, holding: Holding | None, *, expected: bool = True) -> None:
        """Give one holding from now on: holdings that were given before are removed.

        Args:
            expected: whether a holding is going to come; else fellows are refused at once.
        """
        with self._changed:
            before = self._holdings
            self._expected = expected
            self._holdings = () if holding is None else (holding,)
            self._changed.notify_all()
        for one in before:
            one.close()

    def add(self, holding: Holding) -> None:
        """Give one more holding."""
        with self._changed:
            self._holdings = (*self._holdings, holding)
            self._changed.notify_all()

    def drop(self, holding: Holding) -> None:
        """Give a holding no more: its files are removed."""
        with self._changed:
            self._holdings = tuple(one for one in self._holdings if one is not holding)
        holding.close()

    def close(self) -> None:
        """Give no holding any more."""
        self._closed = True
        try:
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread, which closes the listener
        except OSError as error:
            _LOG.debug("the listener was closed already: %s", error)
        self.hold(None)

    def _listen(self) -> None:
        with self._listener:
            while not self._closed:
                try:
                    connection, _ = self._listener.accept()
                except OSError as error:
                    if not self._closed:
                        _LOG.warning("a fellow could not connect: %s", error)
                        time.sleep(0.2)  # no file descriptors, say: not to ask in a busy loop
                    continue
                self._serve_beside(connection)

    def _serve_beside(self, connection: socket.socket) -> None:
        if not self._places.acquire(blocking=False):
            connection.close()  # the fellow takes another source
            return
        try:
            threading.Thread(
                target=self._serve, args=(connection,), name="trainsync-fellow", daemon=True
            ).start()
        except RuntimeError as error:  # no more threads
            _LOG.warning("a fellow is refused: %s", error)
            connection.close()
            self._places.release()

    def _serve(self, connection: socket.socket) -> None:
        link = Link(connection, _MEET_SECONDS)
        try:
            self._give(link)
        except (MemberLostError, NotProvenError, HoldingClosedError, OSError) as error:
            _LOG.info("a fellow at %s got no more: %s", link.peer, error or "a newer version came")
        except Exception:  # noqa: BLE001 - logged; the fellow takes another source
            _LOG.exception("a fellow at %s was not served", link.peer)
        finally:
            link.discard()
            self._places.release()

    def _give(self, link: Link) -> None:
        key = self._key()
        if key is None:
            raise NotProvenError("the run's key is not known yet")
        challenge = Challenge(link, chain_token(key, NAME))
        hello = challenge.hello(_MEET_SECONDS)
        wanted, index, offset = hello.get("version"), hello.get("file"), hello.get("offset")
        with self._changed:
            self._changed.wait_for(
                lambda: self._closed or not self._expected or self._find(wanted), self._wait
            )
            holding = self._find(wanted)
        if holding is None or not _is_within(holding, index, offset):
            link.send({"kind": "refused", "cause": "this version or file is not here"})
            return
        challenge.welcome({"kind": "welcome"})
        connection = link.detach()
        connection.settimeout(self._wait)
        if connection.recv(1) == GO:
            assert isinstance(index, int) and isinstance(offset, int)
            self._stream(connection, holding, index, offset)

    def _find(self, wanted: object) -> Holding | None:
        return next((one for one in self._holdings if one.key == wanted), None)

    def _stream(self, to: socket.socket, holding: Holding, index: int, offset: int) -> None:
        size = holding.files[index].bytes
        fd = open_for_reading(holding.path(index), offset)
        try:
            while offset < size:
                end = holding.there(index, offset, time.monotonic() + self._wait)
                if end <= offset:
                    return  # this agent gets nothing itself: the fellow takes another source
                piece = os.read(fd, min(PIECE_BYTES, end - offset))
                if not piece:
                    return
                failpoint("fellows.passing")
                to.sendall(piece)
                offset += len(piece)
        finally:
            os.close(fd)


def _is_within(holding: Holding, index: object, offset: object) -> bool:
    return (
        isinstance(index, int)
        and isinstance(offset, int)
        and 0 <= index < len(holding.files)
        and 0 <= offset <= holding.files[index].bytes
    )
