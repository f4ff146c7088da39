"""Shares files to check among ranks: each is read once a host, by one of the ranks that need it.

Shards are mapped, and only the slices that a rank needs are copied, so a digest has to be taken
apart from loading. It is taken of whole files, of every file that a rank touches, and all ranks
await the outcome before anything live changes: a flipped bit in a part that no rank needs now would
be one that a rank needs later. Another rank of the same host sees the same bytes of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from trainsync.checkpoint.errors import UnsupportedPlaceError
from trainsync.checkpoint.load.resume import Resume
from trainsync.storage.errors import StorageError
from trainsync.storage.inspect import digests
from trainsync.storage.saves.manifest import check_file

_THREADS: Final = 4  # of one rank: a volume across a network is slow to ask


@dataclass(frozen=True)
class Need:
    """The files that a rank reads, and the host that it is on."""

    host: str
    paths: frozenset[str]


def assign(needs: Sequence[Need], sizes: Mapping[str, int]) -> list[list[str]]:
    """The files that each rank checks, by rank; every file that a host needs falls to one there.

    Args:
        needs: by rank.
        sizes: bytes of each file, by which the work is made even.
    """
    work: list[list[str]] = [[] for _ in needs]
    load = [0] * len(needs)
    hosts: dict[str, dict[str, list[int]]] = {}
    for rank, need in enumerate(needs):
        for path in need.paths:
            hosts.setdefault(need.host, {}).setdefault(path, []).append(rank)
    for paths in hosts.values():
        for path in sorted(paths, key=lambda path: (-sizes[path], path)):
            rank = min(paths[path], key=lambda rank: (load[rank], rank))
            work[rank].append(path)
            load[rank] += sizes[path]
    return work


def verify(resume: Resume, path: str) -> None:
    """Compare a file with the manifest, to the last bit.

    Raises:
        CorruptCheckpointError: it is missing, or differs.
    """
    verify_all(resume, [path])


def verify_all(resume: Resume, paths: Sequence[str]) -> None:
    """`verify` several files, some at once.

    Raises:
        CorruptCheckpointError: of the first that is missing, or differs.
        UnsupportedPlaceError: the checkpoint is in a store, and the caller reads a directory.
    """
    if paths:
        _refuse_store(resume)
    entries = [resume.entry(path) for path in paths]
    try:
        for entry in entries:
            check_file(resume.path, entry, with_digest=False)
        problems = digests.read_all(
            [digests.ExpectedFile(resume.path, entry) for entry in entries],
            threads=_THREADS,
            on_bytes=lambda _: None,
        )
    except (StorageError, OSError) as error:
        raise resume.damaged(str(error)) from error
    for reading, (_, sentence) in problems.items():
        raise resume.damaged(f"{resume.path / reading.entry.path} {sentence}")


def _refuse_store(resume: Resume) -> None:
    """Raises `UnsupportedPlaceError`: the checkpoint is in a store, not in a directory."""
    if resume.store is not None:
        raise UnsupportedPlaceError(
            f"the checkpoint of step {resume.step} is in {resume.store.url}, and this loads from a "
            "directory; expected load_sharded or load_shard, or a run on a volume"
        )
