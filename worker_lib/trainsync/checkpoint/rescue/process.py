"""The process that outlives a rank: hears of its parts, and finishes them when the rank is dead.

It is no child of the rank, as Ray and others kill those with it, and no thread, which dies with it.
It holds no memory but its own: the parts are files, which stay when the rank has gone.

    rank: shard file in memory → told to the process → volume or store → receipt
    rank dies between → the process writes the rest of it, as the very same save

So a save that all ranks had in memory is committed, although they were killed. Where a pod is lost
with that process, the process of the rank's neighbour writes the part from its copy, once asked.

Only the standard library is imported at first: most ranks live on, or end with nothing unfinished.
Nothing of this package imports torch: the process is small, and starts fast.
"""

import json
import logging
import selectors
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from trainsync.checkpoint.save.places.base import SavePlace

_CHUNK: Final = 1 << 20
_IDLE_SECONDS: Final = 5.0
"""Of a rank that lives for so long what a rescue needs is imported: it takes a quarter second."""


def main(arguments: list[str]) -> None:
    """Run it.

    Args:
        arguments: descriptors of the socket and of the rank's process (`os.pidfd_open`); where the
            run's saves go, the attempt, the incarnation, and the rank's `SavePlace.writer`.
    """
    connection, pidfd, where, attempt, incarnation, writer = arguments
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s trainsync.rescue %(levelname)s %(message)s"
    )
    with socket.socket(fileno=int(connection)) as told:
        lines = unfinished_at_death(told, int(pidfd), _prepare)
    if lines:
        from trainsync.checkpoint.rescue.copies import rescue_all
        from trainsync.checkpoint.rescue.messages import decode
        from trainsync.checkpoint.save.places.opening import open_place

        def place_of(writer: str) -> "SavePlace":
            return open_place(where, int(attempt), incarnation, continues=writer or None)

        rescue_all(place_of, writer, [decode(line) for line in lines])


def unfinished_at_death(
    told: socket.socket, pidfd: int, prepare: Callable[[], None] = lambda: None
) -> list[bytes]:
    """Listen until the rank has died; the last line of each part that has not ended.

    Nothing at once where the rank has closed the socket with none of them.

    Args:
        prepare: called once the rank has lived, and said nothing, for a while.

    Raises:
        OSError: the socket.
        ValueError: what came is no message.
    """
    told.setblocking(False)
    lines, parts = Lines(), dict[str, bytes]()
    with selectors.DefaultSelector() as selector:
        selector.register(told, selectors.EVENT_READ)
        selector.register(pidfd, selectors.EVENT_READ)
        is_open = is_alive = True
        patience: float | None = _IDLE_SECONDS
        while is_alive and (is_open or parts):
            ready = {key.fd for key, _ in selector.select(patience)}
            if not ready:
                prepare()
                patience = None
                continue
            is_alive = pidfd not in ready
            if is_open and not _take(told, lines, parts):
                is_open = False
                selector.unregister(told)
    return list(parts.values())


class Lines:
    """Takes bytes as they come, and gives whole lines; one that is cut off is never given."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def take(self, data: bytes) -> list[bytes]:
        """Lines that ``data`` has completed."""
        first, *more = data.split(b"\n")
        self._rest += first
        if not more:
            return []
        lines = [bytes(self._rest), *more[:-1]]
        self._rest = bytearray(more[-1])
        return lines


def _take(told: socket.socket, lines: Lines, parts: dict[str, bytes]) -> bool:
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
        for line in lines.take(data):
            said = json.loads(line)
            part = json.dumps(said["part"], sort_keys=True)
            if said["change"] == "ended":
                parts.pop(part, None)
            else:
                parts[part] = line


def _prepare() -> None:
    """Import what a rescue needs, so that a restart waits for less."""
    import trainsync.checkpoint.rescue.copies
    import trainsync.checkpoint.save.places.opening  # noqa: F401 - for later
