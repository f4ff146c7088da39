"""The process that outlives a rank: hears of its parts, and finishes them when the rank is dead.

It is no child of the rank, as Ray and others kill those with it, and no thread, which dies with it.
It holds no memory but its own: the parts are files, which stay when the rank has gone.
"""

import logging
import selectors
import socket
from typing import Final

from trainsync.checkpoint.rescue.finish import rescue
from trainsync.checkpoint.rescue.messages import KeptPart, Lines, PartKey
from trainsync.checkpoint.save.places.opening import open_place

_CHUNK: Final = 1 << 20


def main(arguments: list[str]) -> None:
    """Run it.

    Args:
        arguments: descriptors of the socket and of the rank's process (`os.pidfd_open`); where the
            run's saves go, the attempt, the incarnation, and the rank's `Place.writer`.
    """
    connection, pidfd, where, attempt, incarnation, writer = arguments
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s trainsync.rescue %(levelname)s %(message)s"
    )
    with socket.socket(fileno=int(connection)) as told:
        parts = unfinished_at_death(told, int(pidfd))
    if parts:
        rescue(open_place(where, int(attempt), incarnation, continues=writer or None), parts)


def unfinished_at_death(told: socket.socket, pidfd: int) -> dict[PartKey, KeptPart | None]:
    """Listen until the rank has died; its parts that were begun and have not ended.

    Nothing at once where the rank has closed the socket with none of them.

    Raises:
        OSError: the socket.
        ValueError: what came is no message.
    """
    told.setblocking(False)
    lines, parts = Lines(), dict[PartKey, KeptPart | None]()
    with selectors.DefaultSelector() as selector:
        selector.register(told, selectors.EVENT_READ)
        selector.register(pidfd, selectors.EVENT_READ)
        is_open = is_alive = True
        while is_alive and (is_open or parts):
            ready = {key.fd for key, _ in selector.select()}
            is_alive = pidfd not in ready
            if is_open and not _take(told, lines, parts):
                is_open = False
                selector.unregister(told)
    return parts


def _take(told: socket.socket, lines: Lines, parts: dict[PartKey, KeptPart | None]) -> bool:
    """Take all that has come; False: no more will."""
    while True:
        try:
            data = told.recv(_CHUNK)
        except BlockingIOError:
            return True
        except ConnectionResetError:
            return False
        if not data:
            return False
        for message in lines.take(data):
            if message.change == "ended":
                parts.pop(message.part, None)
            else:
                parts[message.part] = message.kept
