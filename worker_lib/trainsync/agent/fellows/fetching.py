"""One file from a fellow, the volume or a bucket into a holding; verified by its digest."""

import os
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

from trainsync.agent.fellows.holding import Holding, open_for_reading
from trainsync.agent.fellows.sharing import GO, NAME
from trainsync.api.protocol import Fellow
from trainsync.storage.digest import file_digest
from trainsync.weights.buckets.layout import PIECE_BYTES
from trainsync.weights.errors import DigestMismatchError, MemberLostError, WeightsUnavailableError
from trainsync.weights.transports.broadcast.link import Link, NotProvenError, introduce
from trainsync.weights.transports.chain.chain import chain_token


class FellowFailedError(Exception):
    """A fellow gave no file, or not the right one."""


def from_fellow(
    fellow: Fellow, key: str, holding: Holding, index: int, stall: float, deadline: float
) -> None:
    """Write a fellow's file into a holding as its bytes come.

    Args:
        key: of the run.
        stall: seconds without a byte after which the fellow is given up.
        deadline: of the file, on the monotonic clock.

    Raises:
        FellowFailedError: the fellow failed, and the file is to be written anew.
        OSError: the memory cannot be written to.
    """
    entry = holding.files[index]
    try:
        connection = _joined(
            fellow, key, {"version": holding.key, "file": index, "offset": 0}, stall
        )
    except (OSError, ValueError, MemberLostError, NotProvenError) as error:  # an odd address
        raise FellowFailedError(f"{fellow.name} does not give it: {error}") from error
    with closing(connection):
        _write(holding, index, _pieces(fellow, connection, entry.bytes, deadline))
    if (found := file_digest(holding.path(index))) != entry.digest:
        raise FellowFailedError(
            f"{fellow.name} gave {entry.path} with digest {found}, expected {entry.digest}"
        )


def from_volume(directory: Path, holding: Holding, index: int, deadline: float) -> None:
    """Copy a file of the step's folder ``directory``.

    Raises:
        DigestMismatchError: the file differs from the committed one.
        WeightsUnavailableError: the file could not be read by ``deadline``.
        OSError: the volume or the memory failed.
    """
    path = directory / holding.files[index].path
    fd = open_for_reading(path, 0)
    try:
        from_pieces(holding, index, _pieces_of_file(fd), str(path), deadline)
    finally:
        os.close(fd)


def from_pieces(
    holding: Holding, index: int, pieces: Iterable[bytes], name: str, deadline: float
) -> None:
    """Write a file as its bytes come.

    Args:
        name: of their source, for messages.

    Raises:
        DigestMismatchError: the bytes are not the expected ones.
        WeightsUnavailableError: the bytes did not come by ``deadline``.
        OSError: the memory cannot be written to.
    """
    entry = holding.files[index]
    _write(holding, index, _until(pieces, name, deadline))
    if (found := file_digest(holding.path(index))) != entry.digest:
        raise DigestMismatchError(f"{name} has digest {found}, expected {entry.digest}")


def _joined(fellow: Fellow, key: str, hello: dict[str, object], stall: float) -> socket.socket:
    where = urlsplit(f"//{fellow.address}")
    link = Link(socket.create_connection((where.hostname or "", where.port or 0), stall), stall)
    try:
        introduce(link, chain_token(key, NAME), hello, stall)
        connection = link.detach()
        connection.settimeout(stall)
        connection.sendall(GO)
    except BaseException:
        link.discard()
        raise
    return connection


def _pieces(
    fellow: Fellow, connection: socket.socket, size: int, deadline: float
) -> Iterator[bytes]:
    left = size
    while left:
        if time.monotonic() >= deadline:
            raise FellowFailedError(f"{fellow.name} is too slow")
        try:
            piece = connection.recv(min(PIECE_BYTES, left))
        except OSError as error:
            raise FellowFailedError(f"{fellow.name} gives no more: {error}") from error
        if not piece:
            raise FellowFailedError(f"{fellow.name} gives no more, {left} bytes before the end")
        left -= len(piece)
        yield piece


def _pieces_of_file(fd: int) -> Iterator[bytes]:
    while piece := os.read(fd, PIECE_BYTES):
        yield piece


def _until(pieces: Iterable[bytes], name: str, deadline: float) -> Iterator[bytes]:
    for piece in pieces:
        if time.monotonic() >= deadline:
            raise WeightsUnavailableError(f"{name} could not be read in time")
        yield piece


def _write(holding: Holding, index: int, pieces: Iterator[bytes]) -> None:
    end = 0
    holding.wrote(index, 0)
    with holding.path(index).open("wb", buffering=0) as file:
        for piece in pieces:
            view = memoryview(piece)
            while view:
                view = view[file.write(view) :]
            end += len(piece)
            holding.wrote(index, end)
