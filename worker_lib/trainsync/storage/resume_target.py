"""The step that the newest attempt resumed from, on disk: retention leaves it, whoever restarts.

It is written before the answer that names it is sent, and counts until a newer checkpoint of that
attempt, or of a later one, is committed.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import ConfigDict, TypeAdapter

from trainsync.api.protocol import SaveKind
from trainsync.storage import atomic, records
from trainsync.storage.layout import RunDirectory
from trainsync.storage.receipts import Count


@dataclass(frozen=True, kw_only=True)
class ResumeTarget:
    """``attempt`` trains on from the checkpoint of ``step``."""

    __pydantic_config__: ClassVar[ConfigDict] = records.RECORD_CONFIG

    attempt: Count
    step: Count
    manifest_digest: str
    version: Literal[1] = 1


_TARGET = TypeAdapter(ResumeTarget)


def write_resume_target(run: RunDirectory, target: ResumeTarget) -> None:
    """Replace the one before, atomically. Raises `OSError`."""
    atomic.make_directory(run.resume_target.parent)
    atomic.write_bytes(run.resume_target, records.encode(_TARGET, target))


def read_resume_target(run: RunDirectory) -> ResumeTarget | None:
    """None when no attempt resumed from anything. Raises `DamagedFileError`."""
    try:
        return records.read(_TARGET, run.resume_target)
    except FileNotFoundError:
        return None


def resumed_digest(run: RunDirectory, attempt: int, kind: SaveKind, step: int) -> str | None:
    """Digest of the manifest that ``attempt`` resumed from; None when that is another save.

    Raises `DamagedFileError`.
    """
    target = read_resume_target(run)
    if target is None or kind is not SaveKind.CHECKPOINT:
        return None
    return target.manifest_digest if (target.attempt, target.step) == (attempt, step) else None
