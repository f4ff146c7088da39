"""The state of verl's trainer itself (dataloader, TransferQueue), as a part of each commit."""

import logging
import shutil
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.checkpoint.load.deadline import FilesInTime
from trainsync.checkpoint.load.resume import Resume
from trainsync.checkpoint.load.stored import DifferentBytesError, StoredFiles
from trainsync.checkpoint.load.verify import verify
from trainsync.engines.checkpoints.arguments import ACTOR, CRITIC, TRAINER
from trainsync.engines.checkpoints.step_commits import StepCommits
from trainsync.storage.layout import relative_path
from trainsync.storage.objects.errors import ObjectChangedError, ObjectMissingError
from trainsync.storage.saves.manifest import Manifest
from trainsync.storage.saves.receipts import FileEntry

logger = logging.getLogger(__name__)

_MODELS: Final = frozenset({ACTOR, CRITIC})
_SECONDS: Final = 600.0
"""For the reads of a store; and for the bytes of a trainer on another host."""


@dataclass(frozen=True)
class CarriedFiles:
    """The files that verl's trainer wrote for a step, on their way to the rank that saves them into
    a store: the two have no directory in common.

    Attributes:
        files: path relative to the step → bytes; or a reference of Ray to them.
    """

    files: Any

    def get(self) -> Mapping[str, bytes]:
        """The files. Raises Ray's `GetTimeoutError` where its trainer is away."""
        if isinstance(self.files, Mapping):
            return self.files
        import ray

        files: Mapping[str, bytes] = ray.get(self.files, timeout=_SECONDS)
        return files


class TrainerState:
    """Takes the files that verl's trainer wrote into the directory that it was given for a save.

    Args:
        coordinator: of this rank; rank 0 takes it.
        commits: of the models that were saved with it.
    """

    def __init__(self, coordinator: CheckpointCoordinator, commits: StepCommits) -> None:
        self._coordinator = coordinator
        self._commits = commits

    def save(self, path: Path, step: int, carried: object = None) -> None:
        """Put the files into the step in the background, and register the step.

        Args:
            path: in the trainer's directory, from where the files beside it are moved.
            carried: of a run in a store, the `CarriedFiles`, in place of those beside ``path``.

        Raises:
            CheckpointError, MonitorError: an earlier save failed.
            ValueError: no model was saved at the step; the engine is a critic's; or ``carried`` is
                not as its line in Args says.
        """
        coordinator = self._coordinator
        if prefix := coordinator.component_prefix:
            raise ValueError(
                f"the trainer's own state of step {step} was given to the engine of {prefix!r}; "
                "expected the actor's engine"
            )
        in_store = isinstance(coordinator.where, str)
        if in_store != isinstance(carried, CarriedFiles):
            raise ValueError(
                f"the trainer's own state of step {step} came as {carried!r}, and the run is in "
                f"{coordinator.where}; expected the trainer and the ranks in one run"
            )
        if coordinator.rank == 0 and self._commits.registered != step:
            if isinstance(carried, CarriedFiles):
                files = carried.get()
                coordinator.save_async(TRAINER, lambda work: _write(files, work), step, subdir="")
            else:
                coordinator.save_async(
                    TRAINER, lambda work: _move(path.parent, work), step, subdir=""
                )
        self._commits.finish(step, [(TRAINER, 0)])


def is_trainers(path: str) -> bool:
    """Whether a file of a step is the trainer's; ``path`` is relative to the step."""
    return path.partition("/")[0] not in _MODELS


def trainers_files(manifest: Manifest) -> list[FileEntry]:
    """The files of a step that are the trainer's."""
    return [entry for entry in manifest.files if is_trainers(entry.path)]


def read_trainers(source: Path) -> dict[str, bytes]:
    """What verl's trainer wrote into the step's directory ``source``: relative path → bytes."""
    return {
        str(path.relative_to(source)): path.read_bytes()
        for path in sorted(source.rglob("*"))
        if path.is_file() and is_trainers(str(path.relative_to(source)))
    }


def verify_trainers(resume: Resume) -> None:
    """Compare the trainer's files of a step with the manifest, for verl reads them itself.

    Raises:
        CorruptCheckpointError: one is missing, or differs; the run's monitor was told.
        LoadTimeoutError, StoreError: the store was not read.
    """
    entries = trainers_files(resume.manifest)
    if resume.store is None:
        for entry in entries:
            verify(resume, entry.path)
        return
    files = in_time(resume.store, resume.step)
    for entry in entries:
        try:
            for _ in files.blocks(entry):
                pass
        except (DifferentBytesError, ObjectChangedError, ObjectMissingError) as error:
            raise resume.damaged(str(error)) from error


def in_time(files: StoredFiles, step: int) -> FilesInTime:
    """``files``, to be read within minutes."""
    return FilesInTime.by(files, f"step {step}", time.monotonic() + _SECONDS)


def write_trainers(files: StoredFiles, manifest: Manifest, target: Path) -> None:
    """Write the trainer's files of a step into ``target``, each compared with its digest.

    Raises:
        DifferentBytesError, ObjectChangedError, ObjectMissingError: one is damaged.
        LoadTimeoutError, StoreError: the store was not read.
        OSError: it was not written.
    """
    found = in_time(files, manifest.step)
    for entry in trainers_files(manifest):
        _write_blocks(found.blocks(entry), target / relative_path(entry.path))


def _write_blocks(blocks: Iterator[bytes], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for block in blocks:
            file.write(block)


def _write(files: Mapping[str, bytes], work: Path) -> None:
    for name, data in files.items():
        _write_blocks(iter([data]), work / relative_path(name))


def _move(source: Path, target: Path) -> None:
    for entry in sorted(source.iterdir()):
        if entry.name in _MODELS:
            continue
        try:
            entry.rename(target / entry.name)
        except PermissionError:  # the trainer is another user
            _copy(entry, target / entry.name)
    shutil.rmtree(source.parent, ignore_errors=True)


def _copy(source: Path, target: Path) -> None:
    if source.is_dir():
        shutil.copytree(source, target, symlinks=True)
    else:
        shutil.copyfile(source, target, follow_symlinks=False)
