"""Which processes of an attempt take copies, and where: a file of each on the volume.

The files lie in the staging of the attempt's incarnation, so those of an older attempt are not
seen, and go with it. In a store each is an object (see `trainsync.checkpoint.memory.shared`).
"""

import contextlib
import socket
from collections import Counter
from dataclasses import dataclass
from typing import Annotated, ClassVar, Final, Literal

from pydantic import ConfigDict, Field, TypeAdapter

from trainsync.storage import atomic, records
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves.receipts import Count, Incarnation

LONGEST_DOMAIN: Final = 253
"""Characters of a failure domain's name."""

_LARGEST: Final = 4 << 10
_SUFFIX: Final = ".json"
# Nothing is sent there: the system says from which address it would.
_FAR: Final = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))


@dataclass(frozen=True, kw_only=True)
class CopyHolder:
    """A process that takes copies.

    Attributes:
        id: of this process alone.
        node: the machine, by its name.
        host: the pod.
        rank: of the process in the trainer.
        domain: what may fail at once with the node, such as its zone; empty where it is not known.
    """

    __pydantic_config__: ClassVar[ConfigDict] = records.RECORD_CONFIG

    id: Incarnation
    node: Annotated[str, Field(min_length=1, max_length=253)]
    host: Annotated[str, Field(min_length=1, max_length=253)]
    address: Annotated[str, Field(min_length=1, max_length=64)]
    port: Annotated[int, Field(ge=1, le=65535)]
    rank: Count
    domain: Annotated[str, Field(max_length=LONGEST_DOMAIN)] = ""
    version: Literal[1] = 1


_RECORD: Final = TypeAdapter(CopyHolder)


def name_of(holder: CopyHolder) -> str:
    """The name of a process's file."""
    return f"{holder.id}{_SUFFIX}"


def encode(holder: CopyHolder) -> bytes:
    """The bytes of its file."""
    return _RECORD.dump_json(holder, by_alias=True)


def decode(data: bytes) -> CopyHolder | None:
    """Inverse of `encode`; None: it cannot be understood."""
    try:
        return _RECORD.validate_json(data)
    except ValueError:
        return None


def enter(run: RunDirectory, attempt: int, incarnation: str, holder: CopyHolder) -> None:
    """Let the attempt's other processes know of this one.

    Raises:
        OSError, StorageError: the volume.
    """
    directory = run.copy_holders(attempt, incarnation)
    atomic.make_directory(directory, durably=False)
    atomic.write_bytes(directory / name_of(holder), encode(holder), durably=False)


def read(
    run: RunDirectory, attempt: int, incarnation: str, known: dict[str, CopyHolder] | None = None
) -> list[CopyHolder]:
    """All that have entered, in no order.

    Args:
        known: those of an earlier look, by file, which are not read again; gets the new ones.

    Raises:
        OSError: the volume.
    """
    known = {} if known is None else known
    found = []
    try:
        paths = list(run.copy_holders(attempt, incarnation).iterdir())
    except FileNotFoundError:
        return []
    for path in paths:
        if path.suffix != _SUFFIX or atomic.is_temporary(path.name):
            continue
        if path.name not in known:
            # One that is torn by a crash of the machine, or gone, is of a process that is gone.
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                holder = decode(file.read(_LARGEST))
                if holder is not None:
                    known[path.name] = holder
        if path.name in known:
            found.append(known[path.name])
    return found


def partners(holders: list[CopyHolder], own: CopyHolder) -> list[CopyHolder]:
    """Those that may take the copies of ``own``, the best first; pure.

    Nodes are a ring, sorted by failure domain and name, and each node's partner is as many nodes
    on as the largest domain has: so each takes the copies of one other, of another domain unless
    one has more than half of the nodes. Where all are of one domain, the partner is on the next
    node; where all are on one node, pods are the ring; in one pod there is none. A node's
    processes take turns.
    """
    is_one_node = all(holder.node == own.node for holder in holders)
    domains: dict[str, str] = {}  # of each node one, whatever its processes say
    for holder in (own, *holders):
        domains[holder.node] = min(holder.domain, domains.get(holder.node, holder.domain))
    places: dict[tuple[str, str, str], list[CopyHolder]] = {}
    for holder in {own, *holders}:
        host = holder.host if is_one_node else ""
        places.setdefault((domains[holder.node], holder.node, host), []).append(holder)
    ring = sorted(places)
    if len(ring) == 1:
        return []
    sizes = Counter(domain for domain, _, _ in ring)
    distance = max(sizes.values()) if len(sizes) > 1 else 1
    here = next(place for place in ring if own in places[place])
    order = sorted(places[ring[(ring.index(here) + distance) % len(ring)]], key=_by_rank)
    beside = sorted(places[here], key=_by_rank)
    first = beside.index(own) % len(order)
    return order[first:] + order[:first]


def own_address() -> str:
    """The address of this machine that others of the cluster reach."""
    for family, far in _FAR:
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((far, 9))
            return str(probe.getsockname()[0])
    return "127.0.0.1"


def _by_rank(holder: CopyHolder) -> tuple[int, str]:
    return holder.rank, holder.id
