"""Which processes of an attempt take copies, and where: a file of each on the volume.

The files lie in the staging of the attempt's incarnation, so those of an older attempt are not
seen, and go with it. In a store each is an object (see `trainsync.checkpoint.memory.shared`).
"""

import contextlib
import socket
from dataclasses import dataclass
from typing import Annotated, ClassVar, Final, Literal

from pydantic import ConfigDict, Field, TypeAdapter

from trainsync.storage import atomic, records
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves.receipts import Count, Incarnation

_LARGEST: Final = 4 << 10
_SUFFIX: Final = ".json"
# Nothing is sent there: the system says from which address it would.
_FAR: Final = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))


@dataclass(frozen=True, kw_only=True)
class Keeper:
    """A process that takes copies.

    Attributes:
        id: of this process alone.
        node: the machine, by its name.
        host: the pod.
        rank: of the process in the trainer.
    """

    __pydantic_config__: ClassVar[ConfigDict] = records.RECORD_CONFIG

    id: Incarnation
    node: Annotated[str, Field(min_length=1, max_length=253)]
    host: Annotated[str, Field(min_length=1, max_length=253)]
    address: Annotated[str, Field(min_length=1, max_length=64)]
    port: Annotated[int, Field(ge=1, le=65535)]
    rank: Count
    version: Literal[1] = 1


_RECORD: Final = TypeAdapter(Keeper)


def name_of(keeper: Keeper) -> str:
    """The name of a process's file."""
    return f"{keeper.id}{_SUFFIX}"


def encode(keeper: Keeper) -> bytes:
    """The bytes of its file."""
    return _RECORD.dump_json(keeper, by_alias=True)


def decode(data: bytes) -> Keeper | None:
    """Inverse of `encode`; None: it cannot be understood."""
    try:
        return _RECORD.validate_json(data)
    except ValueError:
        return None


def enter(run: RunDirectory, attempt: int, incarnation: str, keeper: Keeper) -> None:
    """Let the attempt's other processes know of this one.

    Raises:
        OSError, StorageError: the volume.
    """
    directory = run.keepers(attempt, incarnation)
    atomic.make_directory(directory, durably=False)
    atomic.write_bytes(directory / name_of(keeper), encode(keeper), durably=False)


def read(
    run: RunDirectory, attempt: int, incarnation: str, known: dict[str, Keeper] | None = None
) -> list[Keeper]:
    """All that have entered, in no order.

    Args:
        known: those of an earlier look, by file, which are not read again; gets the new ones.

    Raises:
        OSError: the volume.
    """
    known = {} if known is None else known
    found = []
    try:
        paths = list(run.keepers(attempt, incarnation).iterdir())
    except FileNotFoundError:
        return []
    for path in paths:
        if path.suffix != _SUFFIX or atomic.is_temporary(path.name):
            continue
        if path.name not in known:
            # One that is torn by a crash of the machine, or gone, is of a process that is gone.
            with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
                keeper = decode(file.read(_LARGEST))
                if keeper is not None:
                    known[path.name] = keeper
        if path.name in known:
            found.append(known[path.name])
    return found


def partners(keepers: list[Keeper], own: Keeper) -> list[Keeper]:
    """Those that may take the copies of ``own``, the best first; pure.

    Nodes are a ring in the order of their names, and the partner is on the next one. Where all
    are on one node, pods are the ring; in one pod there is none. A node's processes take turns.
    """
    places: dict[tuple[str, str], list[Keeper]] = {}
    is_one_node = all(keeper.node == own.node for keeper in keepers)
    for keeper in keepers:
        name = (keeper.node, keeper.host) if is_one_node else (keeper.node, "")
        places.setdefault(name, []).append(keeper)
    here = (own.node, own.host) if is_one_node else (own.node, "")
    others = sorted(place for place in places if place != here)
    if not others:
        return []
    chosen = next((place for place in others if place > here), others[0])
    order = sorted(places[chosen], key=_by_rank)
    beside = sorted({own, *places.get(here, [])}, key=_by_rank)
    first = beside.index(own) % len(order)
    return order[first:] + order[:first]


def own_address() -> str:
    """The address of this machine that others of the cluster reach."""
    for family, far in _FAR:
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((far, 9))
            return str(probe.getsockname()[0])
    return "127.0.0.1"


def _by_rank(keeper: Keeper) -> tuple[int, str]:
    return keeper.rank, keeper.id
