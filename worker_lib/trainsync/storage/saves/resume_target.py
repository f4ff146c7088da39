"""The step that the newest attempt resumed from, on disk: retention leaves it, in a restart too.

It is written before the answer that names it is sent, and counts until a newer checkpoint of that
attempt, or of a later one, is committed. While it cannot be read, retention removes nothing.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import ConfigDict, TypeAdapter

from trainsync.api.protocol import SaveKind
from trainsync.storage import atomic, records
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves.incarnations import generation
from trainsync.storage.saves.manifest import Age
from trainsync.storage.saves.receipts import Count, Incarnation


@dataclass(frozen=True, kw_only=True)
class ResumeTarget:
    """``attempt`` of the run ``run_uid`` trains on from the checkpoint of ``step``.

    One that an earlier release wrote has no uid, and counts as any run's. The ``incarnation`` is
    None where the attempt was not restarted in place before.
    """

    __pydantic_config__: ClassVar[ConfigDict] = records.RECORD_CONFIG

    attempt: Count
    step: Count
    manifest_digest: str
    run_uid: str | None = None
    incarnation: Incarnation | None = None
    version: Literal[1] = 1

    def age(self, run_uid: str) -> Age:
        """As `Manifest.age`: what another run resumed from is older than all of ``run_uid``."""
        restarts = 0 if self.incarnation is None else generation(self.incarnation)
        return self.run_uid in (None, run_uid), self.attempt, restarts


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


def resumed_from(
    run: RunDirectory, run_uid: str, attempt: int, restarts: int = 0
) -> ResumeTarget | None:
    """The step that ``attempt`` of the run ``run_uid`` resumed from; None: it resumed from none.

    Args:
        restarts: in place, of the attempt: after each it resumes anew.

    Raises `DamagedFileError`.
    """
    target = read_resume_target(run)
    wanted = (True, attempt, restarts)
    return target if target is not None and target.age(run_uid) == wanted else None


def resumed_digest(
    run: RunDirectory, run_uid: str, attempt: int, kind: SaveKind, step: int, restarts: int = 0
) -> str | None:
    """Digest of the manifest that the attempt resumed from; None when that is another save.

    Raises `DamagedFileError`.
    """
    target = resumed_from(run, run_uid, attempt, restarts)
    same = target is not None and (kind, step) == (SaveKind.CHECKPOINT, target.step)
    return target.manifest_digest if target is not None and same else None
