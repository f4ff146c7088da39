"""The checkpoint that a run resumes from, with a manifest that was checked. Needs no torch."""

from dataclasses import dataclass
from pathlib import Path

from trainsync.api.protocol import ResumePoint, SaveKind
from trainsync.checkpoint.errors import CorruptCheckpointError
from trainsync.storage.errors import StorageError
from trainsync.storage.layout import RunDirectory
from trainsync.storage.manifest import Manifest, check_manifest, read_manifest
from trainsync.storage.receipts import FileEntry


@dataclass(frozen=True)
class Resume:
    """Training goes on after ``step``; ``path`` is the directory of that step's files."""

    step: int
    path: Path
    manifest: Manifest

    def entry(self, path: str) -> FileEntry:
        """What the manifest says of a file, by its path relative to the step's directory.

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


def open_resume(directory: Path, point: ResumePoint) -> Resume:
    """Read the manifest that the monitor named, and check the sizes of its files.

    Digests are checked file by file when they are loaded, each by the rank that needs it.

    Raises:
        CorruptCheckpointError: what is on the volume is not what the monitor named.
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
    return Resume(point.step, run.step(point.step), committed.manifest)
