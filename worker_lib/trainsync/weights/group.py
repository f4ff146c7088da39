"""A group of processes for one generation of a broadcast: made and given up within a deadline.

It never touches the default group of torch.distributed. A group on which a collective failed is
over: it is closed and a new one, of a new generation, is made.
"""

import contextlib
import os
import queue
import re
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from trainsync.weights.errors import GroupFailedError

T = TypeVar("T")

IN_FLIGHT: Final = 2
"""Buckets on the wire at once: gloo runs so many collectives beside one another by default."""

_GRACE_SECONDS: Final = 2.0  # beyond a collective's own timeout, for its error to come through


@dataclass(frozen=True)
class Seat:
    """Where a member sits in which group. ``name`` is unique among all groups of a run."""

    host: str
    port: int  # of the root's store
    name: str
    rank: int  # 0 is the root
    size: int


def within(seconds: float, what: str, call: Callable[[], T]) -> T:
    """``call()`` in a thread of its own, which is left behind when it takes too long.

    Some calls of torch cannot be interrupted and keep no deadline when the other side is stopped.

    Raises:
        GroupFailedError: ``call`` raised, or did not end within ``seconds``.
    """
    outcome: queue.SimpleQueue[tuple[T | None, Exception | None]] = queue.SimpleQueue()

    def work() -> None:
        try:
            outcome.put((call(), None))
        except Exception as error:  # noqa: BLE001 - handed to the caller
            outcome.put((None, error))

    threading.Thread(target=work, name=f"trainsync-{what}", daemon=True).start()
    try:
        value, error = outcome.get(timeout=seconds)
    except queue.Empty:
        raise GroupFailedError(f"{what} did not end within {seconds:g} s") from None
    if error is not None:
        raise GroupFailedError(f"{what} failed: {error}") from error
    return value  # type: ignore[return-value] # None only where T is


def host_store(seconds: float) -> Any:
    """A store, served by this process, at which members of a group find one another."""
    return TCPStore(
        "0.0.0.0",  # noqa: S104 - explorers are on other hosts
        0,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=seconds),
    )


class Transfer:
    """One bucket on the wire."""

    def __init__(self, work: Any, data: torch.Tensor, seconds: float) -> None:
        self._work = work
        self._data = data  # must live until the collective has ended
        self._seconds = seconds

    def wait(self) -> None:
        """Until the bucket has arrived.

        Raises:
            GroupFailedError: a member is gone, or the bucket's deadline has passed.
        """
        try:
            done = self._work.wait(timedelta(seconds=self._seconds + _GRACE_SECONDS))
        except RuntimeError as error:
            raise GroupFailedError(f"a bucket did not arrive: {_plain(error)}") from error
        if not done:
            raise GroupFailedError(f"a bucket did not arrive within {self._seconds:g} s")

    def over(self) -> bool:
        """Whether its memory is free: it arrived, or failed."""
        return bool(self._work.is_completed())


class BroadcastGroup:
    """gloo between CPUs. One thread at a time.

    Args:
        seconds: for the group to be made; all members must come meanwhile.
        bucket_seconds: of one collective.
        address: of this process, at which the other members reach it. If it is none of this
            host's, or ``GLOO_SOCKET_IFNAME`` is set, gloo looks for one itself.

    Raises:
        GroupFailedError: a member did not come, or cannot be reached.
    """

    def __init__(
        self, seat: Seat, seconds: float, bucket_seconds: float, address: str | None = None
    ) -> None:
        self.seat = seat
        self._bucket_seconds = bucket_seconds
        self._group: Any = within(
            seconds, "making the group", lambda: _join(seat, seconds, address)
        )
        self._options = dist.BroadcastOptions()
        self._options.rootRank = 0
        self._options.rootTensor = 0

    def broadcast(self, data: torch.Tensor, seconds: float) -> Transfer:
        """Send ``data`` (uint8, contiguous, on the CPU) from the root, or receive into it.

        Args:
            seconds: no collective of the group takes longer than its own deadline; this may be
                less.

        Raises:
            GroupFailedError: the group is over.
        """
        limit = max(0.001, min(seconds, self._bucket_seconds))
        self._options.timeout = timedelta(seconds=limit)
        try:
            work = self._group.broadcast([data], self._options)
        except RuntimeError as error:
            raise GroupFailedError(f"the group is over: {_plain(error)}") from error
        return Transfer(work, data, limit)

    def close(self) -> None:
        """Give it up, at once: its connections end when the last collective has ended."""
        group, self._group = self._group, None
        if group is None:
            return
        holder = [group]
        del group
        # The destructor waits for collectives that still run.
        threading.Thread(target=holder.clear, name="trainsync-close-group", daemon=True).start()


def _join(seat: Seat, seconds: float, address: str | None) -> Any:
    limit = timedelta(seconds=seconds)
    # A client of its own: one that waits for a member holds a lock of the store.
    store = TCPStore(seat.host, seat.port, is_master=False, wait_for_workers=False, timeout=limit)
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._timeout = limit
    options._devices = [_device(address)]
    return dist.ProcessGroupGloo(PrefixStore(seat.name, store), seat.rank, seat.size, options)


def _device(address: str | None) -> Any:
    """Where gloo listens. By itself it takes what the host's name resolves to, which other
    hosts may be unable to reach."""
    if address is not None and "GLOO_SOCKET_IFNAME" not in os.environ:
        with contextlib.suppress(OSError), socket.create_server((address, 0)):
            return dist.ProcessGroupGloo.create_device(hostname=address)
    return dist.ProcessGroupGloo.create_default_device()


def _plain(error: Exception) -> str:
    """gloo's message without the place in its source, and without its advice."""
    text = str(error).strip().partition("\n")[0]
    return re.sub(r"^\[[^\]]*\]\s*", "", text).partition(". This is typically")[0]
