"""The peer of our broadcasts: collectives of torch.distributed over gloo, in a separate group."""

from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

_LOOPBACK: Final = "127.0.0.1"
_ANY: Final = "0.0.0.0"


@dataclass(frozen=True)
class Seat:
    """A member's rank in a group, and the port of the group's store; rank 0 is the root."""

    port: int
    rank: int
    size: int
    host: str = _LOOPBACK
    name: str = "peer"


def host_store(seconds: float, port: int = 0) -> Any:
    """The store through which the members connect."""
    limit = timedelta(seconds=seconds)
    return TCPStore(_ANY, port, is_master=True, wait_for_workers=False, timeout=limit)


class GlooGroup:
    """A gloo group with default settings.

    Args:
        address: the address at which the other members reach this one.
    """

    def __init__(self, seat: Seat, seconds: float, address: str = _LOOPBACK) -> None:
        limit = timedelta(seconds=seconds)
        store = TCPStore(
            seat.host, seat.port, is_master=False, wait_for_workers=False, timeout=limit
        )
        options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = limit
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
        store = PrefixStore(seat.name, store)
        self._group: Any = dist.ProcessGroupGloo(store, seat.rank, seat.size, options)
        self._options = dist.BroadcastOptions()
        self._options.rootRank = 0
        self._options.rootTensor = 0
        self._options.timeout = limit

    def broadcast(self, data: torch.Tensor) -> Any:
        """Begin to send ``data`` (uint8) from the root, or to receive into ``data``; call `wait`
        after."""
        return self._group.broadcast([data], self._options)
