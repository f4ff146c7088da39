"""The reports of ``trainsync checkpoints`` about saves, as plain data."""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainsync.api.base import format_time
from trainsync.api.protocol import SaveKind
from trainsync.storage.inspect.findings import Finding
from trainsync.storage.inspect.pointers import targets
from trainsync.storage.inspect.saves import InspectedSave
from trainsync.storage.layout import RunDirectory
from trainsync.storage.leases import LeaseBook


@dataclass(frozen=True)
class Kept:
    """How many ``bytes`` of a file, or all, an older ``step`` has put."""

    step: int
    bytes: int


@dataclass(frozen=True)
class SaveReport:
    """A save, and what holds it. ``kept``: whether retention would; None where it was not asked."""

    save: InspectedSave
    pointed_at: bool
    leases: tuple[str, ...]
    kept: bool | None = None

    def to_json_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        committed = self.save.committed
        record = committed.manifest if committed else None
        problems = [str(finding) for finding in self.save.findings]
        return {
            "step": self.save.step,
            "kind": self.save.kind.value,
            "attempt": record.attempt if record else None,
            "incarnation": record.incarnation if record else None,
            "files": len(record.files) if record else 0,
            "bytes": record.bytes if record else 0,
            "time": format_time(record.created_at) if record else None,
            "manifestDigest": committed.digest if committed else None,
            "pointedAt": self.pointed_at,
            "leases": list(self.leases),
            "kept": self.kept,
            "problem": problems[0] if problems else None,
        }


def report(
    run: RunDirectory, saves: Sequence[InspectedSave], removed: Collection[int] | None = None
) -> list[SaveReport]:
    """A report on each of ``saves``: its pointer, its leases, and whether retention keeps it.

    Args:
        removed: steps that retention would remove, when that was asked.

    Raises:
        OSError: the volume cannot be read.
    """
    return report_on(saves, targets(run), leases_in_force(run), removed)


def report_on(
    saves: Sequence[InspectedSave],
    pointed: Mapping[SaveKind, int],
    held: Mapping[tuple[SaveKind, int], Sequence[str]],
    removed: Collection[int] | None = None,
) -> list[SaveReport]:
    """`report`, with what the pointers name and what readers hold given."""
    return [
        SaveReport(
            save=save,
            pointed_at=pointed.get(save.kind) == save.step,
            leases=tuple(held.get((save.kind, save.step), ())),
            kept=None if removed is None else save.step not in removed,
        )
        for save in saves
    ]


def leases_in_force(run: RunDirectory) -> dict[tuple[SaveKind, int], list[str]]:
    """Which reader holds which step. Raises `OSError`."""
    found: dict[tuple[SaveKind, int], list[str]] = {}
    for lease in LeaseBook(run).in_force(time.monotonic()):
        found.setdefault((lease.kind, lease.step), []).append(lease.holder)
    return found


def of_saves(saves: Sequence[InspectedSave]) -> list[Finding]:
    """The findings of all ``saves``."""
    return [finding for save in saves for finding in save.findings]
