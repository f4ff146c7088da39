"""Opens the checkpoint that the monitor named to resume from, and checks its manifest.

Needs no torch. The choice is the monitor's: `trainsync.monitor.resume.choice`.
"""

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from trainsync.api.protocol import DamageReport, LoadReport, ResumePoint, SaveKind
from trainsync.checkpoint.errors import CorruptCheckpointError
from trainsync.checkpoint.load.stored import StoredFiles
from trainsync.checkpoint.memory.place import MemoryPlace
from trainsync.checkpoint.shard_names import DATA_CURSOR_FILE
from trainsync.monitor.client.base import MonitorClient
from trainsync.monitor.errors import MonitorError
from trainsync.storage.errors import DamagedFileError, StepGoneError, StorageError
from trainsync.storage.layout import RunDirectory
from trainsync.storage.objects import commits, inspecting
from trainsync.storage.objects.errors import StoreUnavailableError
from trainsync.storage.objects.of_run import open_run_store
from trainsync.storage.saves.manifest import (
    Manifest,
    check_file,
    check_manifest,
    read_manifest,
)
from trainsync.storage.saves.receipts import FileEntry

logger = logging.getLogger(__name__)
_LONGEST: Final = 4096  # characters of a report


@dataclass(frozen=True)
class Resume:
    """Training goes on after ``step``; ``path`` is the directory of that step's files.

    ``report`` tells the run's monitor that a file differs from the manifest, and returns whether
    it could; ``report_load`` tells it of a load. A copy in another process has them, too.
    ``memory``: where shard files may lie, too. ``store``: where the files are of a run without a
    volume; ``path`` is then for messages alone.
    """

    step: int
    path: Path
    manifest: Manifest
    report: Callable[[str], bool] | None = field(default=None, compare=False, repr=False)
    memory: MemoryPlace | None = field(default=None, compare=False, repr=False)
    report_load: Callable[[LoadReport], None] | None = field(
        default=None, compare=False, repr=False
    )
    store: StoredFiles | None = field(default=None, compare=False, repr=False)

    def entry(self, path: str) -> FileEntry:
        """The manifest's entry of a file, by its path relative to the step's directory.

        Raises:
            CorruptCheckpointError: the checkpoint has no such file.
        """
        for entry in self.manifest.files:
            if entry.path == path:
                return entry
        raise CorruptCheckpointError(
            f"the checkpoint of step {self.step} has no {path}; it has "
            + ", ".join(entry.path for entry in self.manifest.files[:20])
        )

    def data_cursor(self, subdir: str = "actor") -> dict[str, Any] | None:
        """The state of the data cursor that was saved with this step; None when none was.

        Raises:
            CorruptCheckpointError: the file is missing, or differs from the manifest.
        """
        path = f"{subdir}/{DATA_CURSOR_FILE}" if subdir else DATA_CURSOR_FILE
        if all(entry.path != path for entry in self.manifest.files):
            return None
        try:
            if self.store is not None:
                data = self.store.read(self.entry(path))
            else:
                check_file(self.path, self.entry(path), with_digest=True)
                data = (self.path / path).read_bytes()
            state: dict[str, Any] = json.loads(data)
        except StoreUnavailableError:
            raise  # an outage is no damage
        except (OSError, StorageError, ValueError) as error:
            raise self.damaged(str(error)) from error
        return state

    def damaged(self, what: str) -> CorruptCheckpointError:
        """The error for a file that differs, or cannot be read; the run's monitor is told."""
        message = f"step {self.step}: {what}"
        if self.report is None or not self.report(message):
            return CorruptCheckpointError(message)
        return CorruptCheckpointError(
            f"{message}; the run's monitor was told and reads this checkpoint: if its bytes have "
            "changed, the next attempt resumes from an older one"
        )


def require_resume(resume: object, caller: str) -> None:
    """Raises `TypeError`: ``resume`` is not what `RunContext.resume` gave, or is None."""
    if resume is None:
        raise TypeError(
            f"{caller}: resume is None: the run has committed nothing, so start at step 0"
        )
    if not isinstance(resume, Resume):
        raise TypeError(
            f"{caller}: resume is a {type(resume).__qualname__}, expected what ctx.resume() gave"
        )


def report_damage(monitor: MonitorClient, step: int, manifest_digest: str, what: str) -> bool:
    """Report to the run's monitor that a committed checkpoint could not be loaded.

    Returns:
        whether the monitor was told.
    """
    report = DamageReport(step=step, manifest_digest=manifest_digest, error=what[:_LONGEST])
    try:
        monitor.report_damage(report)
    except MonitorError as error:  # the caller's own error says more
        logger.error("the monitor does not know that step %d is damaged: %s", step, error)
        return False
    return True


def report_load(monitor: MonitorClient, report: LoadReport) -> None:
    """Tell the run's monitor of a load; a monitor that cannot be told changes nothing."""
    try:
        monitor.report_load(report)
    except MonitorError as error:
        logger.warning("the monitor does not know that step %d was loaded: %s", report.step, error)


def open_resume(
    directory: Path,
    point: ResumePoint,
    report: Callable[[str], bool] | None = None,
    memory: MemoryPlace | None = None,
    report_load: Callable[[LoadReport], None] | None = None,
) -> Resume:
    """Read the manifest that the monitor named, and check the sizes of its files.

    Digests are checked file by file when they are loaded, each by the rank that needs it.

    Args:
        report, memory, report_load: see `Resume`.

    Raises:
        CorruptCheckpointError: the volume has another checkpoint than the monitor named.
    """
    run = RunDirectory(directory)
    try:
        committed = read_manifest(run, SaveKind.CHECKPOINT, point.step)
        if committed.digest != point.manifest_digest:
            raise CorruptCheckpointError(
                f"the manifest of step {point.step} in {directory} has {committed.digest}, the "
                f"monitor named {point.manifest_digest}"
            )
        check_manifest(run, committed.manifest, with_digest=False)
    except (FileNotFoundError, StorageError) as error:
        raise CorruptCheckpointError(
            f"step {point.step} in {directory} cannot be resumed from: {error}"
        ) from error
    return Resume(point.step, run.step(point.step), committed.manifest, report, memory, report_load)


def open_stored_resume(
    url: str,
    point: ResumePoint,
    report: Callable[[str], bool] | None = None,
    memory: MemoryPlace | None = None,
    report_load: Callable[[LoadReport], None] | None = None,
) -> Resume:
    """As `open_resume`, of a run whose checkpoints are in the store of ``url``.

    Raises:
        CorruptCheckpointError: the store has another checkpoint than the monitor named.
        StoreError: the store cannot be read.
    """
    bucket = open_run_store(url)
    try:
        stored = commits.read_manifest(bucket, SaveKind.CHECKPOINT, point.step)
        problems = inspecting.size_findings(bucket, stored)
    except (StepGoneError, DamagedFileError) as error:
        raise CorruptCheckpointError(
            f"step {point.step} in {url} cannot be resumed from: {error}"
        ) from error
    if stored.digest != point.manifest_digest:
        raise CorruptCheckpointError(
            f"the manifest of step {point.step} in {url} has {stored.digest}, the monitor named "
            f"{point.manifest_digest}"
        )
    if problems:
        raise CorruptCheckpointError(
            f"step {point.step} in {url} cannot be resumed from: {problems[0]}"
        )
    return Resume(
        point.step,
        Path(url) / point.path,
        stored.manifest,
        report,
        memory,
        report_load,
        StoredFiles.named_by(url, stored),
    )
