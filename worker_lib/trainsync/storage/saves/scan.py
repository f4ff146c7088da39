"""The disk as a plain snapshot: what is in staging of an incarnation, and whose it is."""

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from trainsync.api.protocol import SaveKind
from trainsync.storage.atomic import is_temporary, is_there
from trainsync.storage.errors import DamagedFileError
from trainsync.storage.layout import (
    FAILURE_SUFFIX,
    RECEIPT_SUFFIX,
    RunDirectory,
    SaveDirectory,
    parse_owner,
    parse_step,
)
from trainsync.storage.saves import receipts
from trainsync.storage.saves.receipts import (
    ParticipantFailure,
    Receipt,
    SaveOutcome,
    SaveRegistration,
)


@dataclass(frozen=True)
class SaveOnDisk:
    """One save's directory in staging."""

    kind: SaveKind
    step: int
    registration: SaveRegistration | None
    outcome: SaveOutcome | None
    receipts: tuple[Receipt, ...] = ()
    failures: tuple[ParticipantFailure, ...] = ()
    damaged: tuple[str, ...] = field(default=())
    """A sentence for each file of ours that cannot be understood or speaks of another save."""


class Scanner:
    """Reads staging; a file is parsed again only when its inode, size or time changed."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self._cache: dict[
            Path, tuple[tuple[int, int, int], Receipt | ParticipantFailure | str]
        ] = {}

    def saves(
        self,
        attempt: int,
        incarnation: str,
        skip: Callable[[SaveKind, int], bool] = lambda _kind, _step: False,
    ) -> list[SaveOnDisk]:
        """Saves in staging of one incarnation, by kind and step, but for those ``skip`` says.

        Raises:
            OSError: the volume cannot be read.
        """
        owner = self._run.owner(attempt, incarnation)
        seen: set[Path] = set()
        found = []
        for kind in SaveKind:
            for name in sorted(_names(owner / kind.value)):
                step = parse_step(name)
                if step is not None and not skip(kind, step):
                    directory = self._run.save(attempt, incarnation, kind, step)
                    found.append(self._save(directory, kind, step, attempt, incarnation, seen))
        for path in [p for p in self._cache if p not in seen and p.is_relative_to(owner)]:
            del self._cache[path]
        return found

    def _save(
        self,
        directory: SaveDirectory,
        kind: SaveKind,
        step: int,
        attempt: int,
        incarnation: str,
        seen: set[Path],
    ) -> SaveOnDisk:
        registration, outcome, damaged = None, None, []
        try:
            registration = receipts.read_registration(directory)
        except FileNotFoundError:
            pass  # receipts may come before the registration
        except DamagedFileError as error:
            damaged.append(str(error))
        try:
            outcome = receipts.read_outcome(directory)
        except DamagedFileError as error:
            damaged.append(str(error))
        good: list[Receipt] = []
        bad: list[ParticipantFailure] = []
        identity = (kind, step, attempt, incarnation)
        try:
            names = sorted(_names(directory.receipts))
        except NotADirectoryError:
            names = []
            damaged.append(f"{directory.receipts} is not a directory")
        for name in names:
            path = directory.receipts / name
            if is_temporary(name) or not name.endswith(RECEIPT_SUFFIX):
                continue
            seen.add(path)
            try:
                record = self._record(path)
            except FileNotFoundError:
                continue  # replaced or removed under our eyes; the next scan sees
            if isinstance(record, str):
                damaged.append(record)
            elif (record.kind, record.step, record.attempt, record.incarnation) != identity:
                damaged.append(f"{path}: speaks of another save")
            elif isinstance(record, Receipt):
                good.append(record)
            else:
                bad.append(record)
        return SaveOnDisk(
            kind, step, registration, outcome, tuple(good), tuple(bad), tuple(damaged)
        )

    def _record(self, path: Path) -> Receipt | ParticipantFailure | str:
        info = path.lstat()
        stamp = (info.st_ino, info.st_size, info.st_mtime_ns)
        cached = self._cache.get(path)
        if cached is not None and cached[0] == stamp:
            return cached[1]
        record: Receipt | ParticipantFailure | str
        try:
            if path.name.endswith(FAILURE_SUFFIX):
                record = receipts.read_failure(path)
            else:
                record = receipts.read_receipt(path)
        except DamagedFileError as error:
            record = str(error)
        self._cache[path] = (stamp, record)
        return record


def owners(run: RunDirectory) -> list[tuple[int, str]]:
    """(attempt, incarnation) of every directory in staging, oldest attempt first."""
    return sorted(owner for name in _names(run.staging) if (owner := parse_owner(name)))


def registered(run: RunDirectory, attempt: int, incarnation: str, kind: SaveKind) -> Iterator[int]:
    """Steps of which a save of ``kind`` is registered, the greatest first. Raises `OSError`."""
    names = _names(run.owner(attempt, incarnation) / kind.value)
    steps = sorted((step for name in names if (step := parse_step(name)) is not None), reverse=True)
    for step in steps:
        if is_there(run.save(attempt, incarnation, kind, step).registration):
            yield step


def _names(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)  # noqa: PTH208 - names are wanted, not paths
    except FileNotFoundError:
        return []
