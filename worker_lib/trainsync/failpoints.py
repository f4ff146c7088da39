"""Points of the code where a test may stop, kill or fail the process. All are off by default.

As etcd's gofail: the code names a point, and a test that enabled a handler for the point's area is
told of it in the thread that reached it. What the handler raises is raised there.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

SAVE: Final = "save"
COMMIT: Final = "commit"
SEND: Final = "send"
RECEIVE: Final = "receive"
STAGE: Final = "stage"
SERVER: Final = "server"
AGENT: Final = "agent"
STORE: Final = "store"
LIVE: Final = "live"
COPY: Final = "copy"
MEMORY: Final = "memory"
RESCUE: Final = "rescue"
PUBLISH: Final = "publish"
NEIGHBOUR: Final = "neighbour"
FELLOWS: Final = "fellows"

POINTS: Final = {
    SAVE: (
        "staged",  # the bytes are copied
        "granted",  # the permit to write is held
        # Once for every file of the save:
        "opened",  # a temporary file exists
        "written",  # its bytes are handed to the system
        "fsynced",  # they are on disk
        "renamed",  # the file has its name
        "receipt",  # the receipt is on disk
        "told",  # the monitor knows
    ),
    COMMIT: (
        "promoting",  # before each file
        "promoted",
        "superseding",  # before a save takes an older one's place
        "manifest",
        "pointing",  # before a pointer is replaced
        "pointer",
        "retention",
        "cleaned",
        "aborting",
        "rolling_back",  # before each step that is put aside
    ),
    SEND: (
        "prepared",  # the explorers took the schema
        "joining",  # the group is about to be made (only when the members changed)
        "joined",
        "bucket",  # on the wire; once for each
        "sent",  # all buckets have arrived
        "committed",  # the explorers are told to serve the version
    ),
    RECEIVE: (
        "prepared",  # the schema is taken
        "joining",  # the group is about to be made (only when the members changed)
        "joined",
        "bucket",  # it has come; once for each
        "received",  # all buckets have come
        "flipping",  # the digest agrees, and the version is about to be served
        "flipped",
        "acknowledged",  # the trainer is told
    ),
    STAGE: (
        "tensor",  # it is copied and digested; once for each
    ),
    SERVER: (
        "pausing",  # before the server is paused
        "paused",
        "bucket",  # SGLang has loaded one, by a route of buckets; once for each
        "loaded",  # it has the weights, under the old name
        "named",  # it says that it has the version
        "resuming",  # before it goes on
    ),
    AGENT: (
        "fetching",  # before a version is fetched
        "fetched",
        "staged",
        "updated",  # the server generates with it
        "judging",  # before the server is asked for its canaries
        "judged",  # they were compared
        "reporting",  # before the monitor is told of the server
        "reported",
    ),
    STORE: (
        "object",  # it is in the store; once for each
        "uploaded",  # all are, and the manifest is about to be put
        "reserved",  # its key has a mark, in whose place it comes
        "superseding",  # before it takes the place of an older attempt's
        "manifest",
        "pointer",
    ),
    LIVE: (
        "shard",  # an object of a part is in the store; once for each
        "receipt",  # the receipt is, too
        "term",  # before the term is replaced, by a claim or an intent
        "intent",  # the term says what is about to be committed
        "outcome",  # before the end of a save is recorded
        "removing",  # before a step is removed
        "pinned",  # the objects of an older step are kept for the save at hand
        "uncommitted",  # the manifest of a step that is removed is gone
        "unnamed",  # before its objects that no other save names are removed
        "sweeping",  # what an incarnation before has left is about to be removed
        "rolling_back",  # before a manifest is set aside by a roll-back; once for each
        "rolled_aside",  # when the manifest lies aside, too
        "rolled_marked",  # when the manifest's key has the mark in its place
    ),
    COPY: (
        "staged",  # a file's bytes are on the volume; once for each
        "promoting",  # before each file
        "promoted",
        "manifest",
        "pointer",
    ),
    MEMORY: (
        "opened",  # a file is about to be kept in memory, too
        "sealing",  # its bytes are whole
        "sealed",  # it has the name under which it is found
        "told",  # what outlives the process can finish it
        "dropping",  # before files that no load needs go
        "spared",  # one of these waits for the next file of its part
        "taken",  # it has that file's name, and its own bytes
    ),
    RESCUE: (
        "finishing",  # what outlives a process is about to write its part
        "written",  # the part's files are where the save goes
    ),
    PUBLISH: (
        "claimed",  # the index is the trainer's
        "object",  # a version's object is in the store, and the index is about to name it
        "indexed",  # the index has moved
        "anchor",  # an anchor is in the store, and the index is about to name it
    ),
    NEIGHBOUR: (
        "asking",  # a partner is about to be asked to take a file
        "sending",  # a piece of it is on the wire; once for each
        "taking",  # the partner has that piece; once for each
        "copied",  # the partner has the file
        "giving",  # a rank that loads asks for a file
        "given",  # a piece of it is on the wire; once for each
        "fetching",  # that rank has the piece; once for each
    ),
    FELLOWS: (
        "passing",  # before a piece goes to the agent behind; once for each
        "held",  # a file is whole here
    ),
}
"""The points of each area, in the order in which they are reached: a rank's save, the monitor's
commit, a broadcast on the trainer and on an explorer, a version in shared memory, an update of a
server, a round of an agent, a save that goes into a store, one that is copied onto a volume, what a
rank's save keeps in memory, a part that is finished when its rank is dead, weights that go into a
store, copies of what is in memory with a neighbour, and a version's files from agent to agent."""

Handler = Callable[[str], None]

_handlers: dict[str, tuple[Handler, ...]] = {}
_changing = threading.Lock()


def failpoint(name: str) -> None:
    """Tell the handlers that ``name``, such as ``save.renamed``, is reached.

    Raises:
        What a handler raises.
    """
    if not _handlers:
        return
    area, _, point = name.partition(".")
    for handler in _handlers.get(area, ()):
        handler(point)


def enable(area: str, handler: Handler) -> None:
    """Tell ``handler`` of every point of ``area`` from now on, in every thread of this process.

    Raises:
        ValueError: there is no such area.
    """
    if area not in POINTS:
        raise ValueError(f"no failpoint is in {area!r}; expected one of {', '.join(POINTS)}")
    with _changing:
        _handlers[area] = (*_handlers.get(area, ()), handler)


def disable_all() -> None:
    """Tell no handler of anything any more."""
    with _changing:
        _handlers.clear()


@contextmanager
def enabled(area: str, handler: Handler) -> Iterator[None]:
    """`enable` for as long as the body runs."""
    enable(area, handler)
    try:
        yield
    finally:
        with _changing:
            left = list(_handlers.get(area, ()))
            if handler in left:  # else `disable_all` was called meanwhile
                left.remove(handler)
            _handlers[area] = tuple(left)
            if not left:
                del _handlers[area]
