"""A chain of connections: the trainer, then one explorer after the other, each passing on at once.

Plain connections, one between neighbours: for any number of explorers the trainer's network carries
the weights once. A member reads, passes on and digests in one thread, a piece at a time
that is still in its processor's cache; nothing else touches the memory, so that it is free as soon
as a call has returned, or failed. A chain that has failed is over: a new one, of another name, is
made of those that are left.
"""

import hashlib
import hmac
import os
import socket
import struct
import time
from collections.abc import Callable
from typing import Final

from trainsync.weights.errors import GroupFailedError, MemberLostError
from trainsync.weights.transports.broadcast.link import Link, NotProvenError, introduce

_TIMEOUT: Final = struct.Struct("ll")  # struct timeval
_CONFIRMED: Final = b"\x06"
_LEAST_SECONDS: Final = 0.001  # 0 would mean no limit

_LOCAL_BUFFER: Final = 512 << 10
"""Of a connection within a host, for each direction: what the system takes by itself outgrows the
processor's cache, which costs a sixth more."""

_AWAKE_SECONDS: Final = 50e-6
"""A member that waits for a neighbour polls for so long before it sleeps: waking it for every few
packets costs the neighbour more than the copying does. It does not poll while other threads want
the core: they get it for much longer than that, and the data waits for them."""

ChainAddress = tuple[str, int]
"""Address and port where an explorer lets in the member before it."""


def chain_token(token: str, name: str) -> str:
    """The secret of one chain, derived from the attempt's, so that it need not be sent."""
    return hmac.new(token.encode(), f"chain {name}".encode(), hashlib.sha256).hexdigest()


def join_next(address: ChainAddress, token: str, name: str, seconds: float) -> socket.socket:
    """A connection to the next member, when the chain behind it is complete.

    Args:
        token: the attempt's secret, which both sides prove.
        name: of the chain.

    Raises:
        GroupFailedError: it is not there within ``seconds``, or does not know the secret.
    """
    started = time.monotonic()
    link = None
    try:
        link = Link(socket.create_connection(address, seconds), seconds)
        left = max(_LEAST_SECONDS, started + seconds - time.monotonic())
        introduce(link, chain_token(token, name), {"chain": name}, left)
        return link.detach()
    except (OSError, MemberLostError, NotProvenError) as error:
        if link is not None:
            link.discard()
        raise GroupFailedError(
            f"the next explorer, at {address[0]}:{address[1]}, does not join: {error}"
        ) from error


class Chain:
    """One member's place in it. One thread.

    Args:
        before: connection to the member before, None for the trainer. Belongs to the chain now.
        after: to the one behind, None for the last.
        bucket_seconds: of the waiting for one bucket.

    Raises:
        GroupFailedError: a neighbour is gone already. Both connections are closed.
    """

    def __init__(
        self,
        name: str,
        before: socket.socket | None,
        after: socket.socket | None,
        bucket_seconds: float,
    ) -> None:
        self.name = name
        self._before = before
        self._after = after
        self._bucket_seconds = bucket_seconds
        self._deadline = 0.0
        self._left = 0.0
        self._awake = _AWAKE_SECONDS
        try:
            for connection in (before, after):
                if connection is not None:
                    connection.settimeout(None)  # the system keeps the time, without a call for it
                    _keep_in_cache(connection)
        except OSError as error:  # reset already: the system knows its peer no more
            self.close()
            raise GroupFailedError(f"a neighbour is gone: {error}") from error

    def begin_bucket(self, deadline: float) -> None:
        """From now on, `carry` waits for no longer than a bucket may take, all calls together.

        Args:
            deadline: of the whole, on the monotonic clock.
        """
        self._deadline = deadline
        self._left = self._bucket_seconds
        self._awake = _AWAKE_SECONDS

    def carry(self, data: memoryview) -> None:
        """Send ``data``, or receive into it and pass it on.

        Raises:
            GroupFailedError: a neighbour is gone, or too slow. The chain is over.
        """
        started = time.monotonic()
        end = min(self._deadline, started + self._left)
        if self._before is not None:
            self._receive(self._before, data, end)
        if self._after is not None:
            self._send(self._after, data, end)
        self._left -= time.monotonic() - started

    def confirm(self, deadline: float) -> None:
        """After the last bucket: wait until all members behind have it; tell the member before.

        Raises:
            GroupFailedError: a member has not. The chain is over.
        """
        self.begin_bucket(deadline)
        end = min(deadline, time.monotonic() + self._left)
        word = bytearray(len(_CONFIRMED))
        if self._after is not None:
            self._receive(self._after, memoryview(word), end)
            if word != _CONFIRMED:
                raise GroupFailedError(f"a neighbour sent {bytes(word)!r} for a confirmation")
        if self._before is not None:
            self._send(self._before, memoryview(_CONFIRMED), end)

    def close(self) -> None:
        """Leave the chain at once; the neighbours notice."""
        for connection in (self._before, self._after):
            if connection is not None:
                connection.close()

    def _receive(self, connection: socket.socket, data: memoryview, end: float) -> None:
        def receive(rest: memoryview, flags: int) -> int:
            count = connection.recv_into(rest, 0, flags)
            if count == 0:
                raise GroupFailedError("a neighbour has left")
            return count

        self._move(connection, socket.SO_RCVTIMEO, receive, data, end)

    def _send(self, connection: socket.socket, data: memoryview, end: float) -> None:
        self._move(connection, socket.SO_SNDTIMEO, connection.send, data, end)

    def _move(
        self,
        connection: socket.socket,
        option: int,
        call: Callable[[memoryview, int], int],
        data: memoryview,
        end: float,
    ) -> None:
        """All of ``data``, with calls that move some of it; sleeps only after a while of asking."""
        moved = time.monotonic()
        flags: int = socket.MSG_DONTWAIT
        while data:
            now = time.monotonic()
            self._check(now, end)
            try:
                data = data[call(data, flags) :]
                moved, flags = time.monotonic(), socket.MSG_DONTWAIT
            except BlockingIOError:
                if now - moved < self._awake:
                    os.sched_yield()
                    if time.monotonic() - now > _AWAKE_SECONDS:  # others want this core
                        self._awake = 0.0
                else:
                    connection.setsockopt(socket.SOL_SOCKET, option, _timeout(end - now))
                    flags = 0
            except OSError as error:
                raise GroupFailedError(f"a neighbour is gone: {error}") from error

    def _check(self, now: float, end: float) -> None:
        if now >= end:
            which = "the version's" if end >= self._deadline else "a bucket's"
            raise GroupFailedError(f"{which} deadline has passed on the wire")


def _timeout(seconds: float) -> bytes:
    """For the system, which takes 0 for "no limit"."""
    whole = int(seconds)
    return _TIMEOUT.pack(whole, max(1000, int((seconds - whole) * 1e6)))


def _keep_in_cache(connection: socket.socket) -> None:
    """Between hosts the system chooses the size by the line's own delay."""
    if connection.getsockname()[:1] == connection.getpeername()[:1]:
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            connection.setsockopt(socket.SOL_SOCKET, option, _LOCAL_BUFFER)
