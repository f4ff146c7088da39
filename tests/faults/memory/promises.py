"""Promises of what is kept in memory: the tier that serves each rank, and what is left over."""

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

import torch
from trainsync.checkpoint.memory.place import MemoryPlace
from trainsync.storage import atomic, digest
from trainsync.storage.errors import StorageError
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves import manifest
from trainsync.storage.saves.manifest import Manifest
from trainsync.storage.saves.receipts import FileEntry

from tests.faults.processes import BrokenError

COMPONENTS: Final = ("model", "extra_state")
SLOW_SECONDS: Final = 30.0
"""More than a load may wait for a rank that is gone (15 s), on a busy machine."""
_END_SECONDS: Final = 30.0  # for what outlives a rank to write the rank's parts
_BESIDE: Final = frozenset({"alive", "lock", "guests"})


class Tier(StrEnum):
    """Where a rank's bytes come from."""

    MEMORY = "its pod's memory"
    NEIGHBOUR = "its neighbour's memory"
    VOLUME = "the volume"


@dataclass(frozen=True)
class Report:
    """What a rank says of its start.

    Attributes:
        step: that it goes on after; None: there was no checkpoint.
        memory, volume, neighbour: bytes, as in `Loaded`.
    """

    step: int | None
    memory: int = 0
    volume: int = 0
    neighbour: int = 0
    seconds: float = 0.0

    def of(self, tier: Tier) -> int:
        """Bytes that came from there."""
        if tier is Tier.VOLUME:
            return self.volume
        return self.neighbour if tier is Tier.NEIGHBOUR else self.memory - self.neighbour


@dataclass(frozen=True)
class Pod:
    """What lies whole in a pod's memory: digests of the bytes, not of the names."""

    digests: frozenset[str]

    @classmethod
    def look(cls, place: MemoryPlace) -> "Pod":
        """What is there now."""
        return cls(
            frozenset(
                kept.digest
                for one in places_of(place)
                for kept in one.files()
                if kept.digest is not None and digest_of(one.path(kept)) == kept.digest
            )
        )


def places_of(place: MemoryPlace) -> list[MemoryPlace]:
    """A pod's own files, and those of its neighbours."""
    return [place] if place.guests is None else [place, place.guests]


def digest_of(path: Path) -> str:
    """Of a file's bytes."""
    hasher = digest.new_hasher()
    hasher.update(path.read_bytes())
    return digest.format_digest(hasher)


def world_size_of(saved: Manifest) -> int:
    """The number of ranks that saved."""
    return len({participant.rank for participant in saved.participants})


def files_of(saved: Manifest, rank: int, world_size: int) -> list[FileEntry]:
    """The files that a rank reads, where as many ranks saved."""
    paths = {f"actor/{name}_world_size_{world_size}_rank_{rank}.pt" for name in COMPONENTS}
    return [entry for entry in saved.files if entry.path in paths]


def check_tiers(
    saved: Manifest,
    reports: Sequence[Report],
    pods: Mapping[int, Pod],
    where: Sequence[int],
    copies: int,
) -> None:
    """Check that each file came from the nearest place that had it whole.

    Args:
        reports: by rank; as many ranks as saved.
        pods: by their numbers, as they were before the load.
        where: the number of each rank's pod.
    """
    used = [pods[number] for number in set(where)]
    for rank, report in enumerate(reports):
        expected = [0, 0, 0]
        for entry in files_of(saved, rank, len(reports)):
            own = entry.digest in pods[where[rank]].digests
            other = copies > 0 and any(entry.digest in pod.digests for pod in used)
            expected[0 if own else 1 if other else 2] += entry.bytes
        found = [report.of(tier) for tier in Tier]
        if found != expected:
            raise BrokenError(
                f"rank {rank} read {found} bytes of {', '.join(Tier)}; the nearest that had "
                f"them whole were {expected}"
            )


def check_tier(rank: int, report: Report, tiers: Sequence[Tier]) -> None:
    """Check that a rank read all of its files from these."""
    found = {tier: report.of(tier) for tier in Tier}
    if not any(found.values()) or any(found[tier] for tier in Tier if tier not in tiers):
        shown = ", ".join(f"{size} bytes of {tier}" for tier, size in found.items())
        raise BrokenError(f"rank {rank} had to read {' or '.join(tiers)}; it read {shown}")


def check_state(
    rank: int,
    found: Mapping[str, torch.Tensor],
    saved: Mapping[str, torch.Tensor],
    extra: Mapping[str, Any],
    saved_extra: Mapping[str, Any],
) -> None:
    """Check that every bit of a rank's state is of one step, and of the attempt that saved it."""
    for name, tensor in saved.items():
        if not torch.equal(found[name], tensor):
            raise BrokenError(f"{name} of rank {rank} is not what was saved: {saved_extra}")
    if extra != saved_extra:
        raise BrokenError(f"rank {rank} goes on with {extra}, saved was {saved_extra}")


def check_answered(what: str, seconds: float, limit: float = SLOW_SECONDS) -> None:
    """Check that a training was not held up."""
    if seconds > limit:
        raise BrokenError(f"{what} took {seconds:.1f} s, expected at most {limit:g} s")


def check_whole(run: RunDirectory, saved: Manifest) -> None:
    """Check a commit's files, to the last bit."""
    try:
        manifest.check_manifest(run, saved, with_digest=True)
    except (OSError, StorageError) as error:
        raise BrokenError(f"committed step {saved.step} is torn: {error}") from error


def check_left(places: Iterable[MemoryPlace], steps: Iterable[int]) -> None:
    """Check that nothing lies in memory but whole files of these steps, and what is always there.

    A part of the last attempt may also have left the one file that its next save would have
    written again. The processes have ended.
    """
    allowed = set(steps)
    for place in (one for pod in places for one in places_of(pod)):
        kept = {file.name: file for file in place.files()}
        last = max((file.attempt for file in kept.values()), default=0)
        of_last = (file for file in kept.values() if file.attempt == last)
        spares = {file.part: file for file in of_last if file.is_spare}
        for path in place.directory.iterdir() if place.directory.is_dir() else ():
            file = kept.get(path.name)
            if path.name in _BESIDE or file in spares.values():
                continue
            if file is None or file.digest is None or file.step not in allowed:
                raise BrokenError(f"{path} is left in memory; needed are steps {sorted(allowed)}")
            if digest_of(path) != file.digest:
                raise BrokenError(f"{path} has other bytes than its name says")


def check_no_temporaries(run: RunDirectory) -> None:
    """Check that no process left a file that it was writing. They have ended."""
    found = [path for path in run.root.rglob("*") if atomic.is_temporary(path.name)]
    if found:
        raise BrokenError(f"temporary files are left: {', '.join(map(str, sorted(found)))}")


def check_no_processes(known: Iterable[int] = (), seconds: float = _END_SECONDS) -> None:
    """Check that what outlives ranks ends, and no other process but the ``known`` is left.

    This process is their reaper, and the ``known`` are its own children.
    """
    own, end = set(known), time.monotonic() + seconds
    while True:
        text = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
        left = {int(child) for child in text.split()} - own
        left = {child for child in left if os.waitpid(child, os.WNOHANG) == (0, 0)}
        if not left:
            return
        if time.monotonic() > end:
            raise BrokenError(f"processes are left: {sorted(left)}")
        time.sleep(0.01)
