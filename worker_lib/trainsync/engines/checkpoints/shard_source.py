"""Where a rank's shards are loaded from: a committed step of the run, or a directory elsewhere."""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from trainsync.api.protocol import SaveKind
from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.checkpoint.errors import CorruptCheckpointError
from trainsync.checkpoint.load.loading import rank_shard_path, read_shard
from trainsync.checkpoint.load.reshard.shard_files import allow_dtensors, find_component
from trainsync.checkpoint.load.resume import Resume
from trainsync.checkpoint.load.step_files import StepFiles
from trainsync.checkpoint.load.stored import StoredFiles
from trainsync.checkpoint.shard_names import shard_file_name
from trainsync.engines.checkpoints.paths import inside_run, step_and_folder
from trainsync.storage.errors import DamagedFileError, StepGoneError, StorageError
from trainsync.storage.layout import RunDirectory, step_name
from trainsync.storage.objects import commits
from trainsync.storage.objects.address import is_url
from trainsync.storage.objects.of_run import open_run_store
from trainsync.storage.saves.manifest import read_manifest

logger = logging.getLogger(__name__)

# What verl's own files hold besides tensors: the state of NumPy's generator, which is data.
_NUMPY_DATA = [
    np._core.multiarray._reconstruct,  # type: ignore[attr-defined]
    np.ndarray,
    np.dtype,
    type(np.dtype(np.uint32)),
]


class ShardSource(Protocol):
    """Shards of one checkpoint."""

    @property
    def step(self) -> int | None:
        """The step of the run that it is; None for a directory elsewhere."""
        ...

    def read(self, name: str, rank: int, world_size: int) -> Any:
        """The part that ``rank`` saved as ``name`` (model, optim, extra_state); tensors on the CPU.

        Raises:
            CorruptCheckpointError: it is missing or damaged.
            WorldSizeMismatchError: another number of ranks saved it.
        """
        ...


def open_source(local_path: str | Path, coordinator: CheckpointCoordinator) -> ShardSource:
    """The shards in ``local_path``.

    Args:
        coordinator: of the run.

    Raises:
        CorruptCheckpointError: in the run, and not committed.
        StoreError: the run's store cannot be read.
        ValueError: in the run, and not a folder of a step; or in a store that is not the run's.
    """
    if is_elsewhere(local_path, coordinator):
        return ForeignDirectory(Path(local_path))
    return committed_step(local_path, coordinator)


def is_elsewhere(local_path: str | Path, coordinator: CheckpointCoordinator) -> bool:
    """Whether ``local_path`` is no place of the run; warns of what is loaded from there.

    Raises:
        ValueError: it is in a store that is not the run's.
    """
    if inside_run(local_path, coordinator.where) is not None:
        return False
    if is_url(str(local_path)):
        raise ValueError(
            f"{local_path} is not a place of this run, which is in {coordinator.where}; expected a "
            "directory, to which `trainsync checkpoints cp` copies a step of another bucket"
        )
    logger.warning(
        "%s is not in the run's place %s: it is loaded without being verified",
        local_path,
        coordinator.where,
    )
    return True


def committed_step(local_path: str | Path, coordinator: CheckpointCoordinator) -> "CommittedStep":
    """The committed checkpoint that ``local_path`` is a folder of.

    Args:
        coordinator: of the run; its memory may have the shards, too.

    Raises:
        CorruptCheckpointError: it is not committed.
        StoreError: the run's store cannot be read.
        ValueError: it is not a folder of a step.
    """
    where = coordinator.where
    step, folder = step_and_folder(local_path, where)
    if isinstance(where, str):
        return CommittedStep(_stored(local_path, where, step, coordinator), folder)
    run = RunDirectory(where)
    try:
        committed = read_manifest(run, SaveKind.CHECKPOINT, step)
    except FileNotFoundError:
        raise CorruptCheckpointError(
            f"{local_path} is not a committed checkpoint: {run.manifest(SaveKind.CHECKPOINT, step)}"
            " is missing; to load what another program saved, keep it outside the run's directory"
        ) from None
    except StorageError as error:
        raise CorruptCheckpointError(f"{local_path} cannot be loaded: {error}") from error
    resume = Resume(
        step,
        run.step(step),
        committed.manifest,
        partial(coordinator.report_damage, step, committed.digest),
        coordinator.memory,
        coordinator.report_load,
    )
    return CommittedStep(resume, folder)


def _stored(
    local_path: str | Path, url: str, step: int, coordinator: CheckpointCoordinator
) -> Resume:
    try:
        found = commits.read_manifest(open_run_store(url), SaveKind.CHECKPOINT, step)
    except StepGoneError as error:
        raise CorruptCheckpointError(f"{local_path} cannot be loaded: {error}") from None
    except DamagedFileError as error:
        raise CorruptCheckpointError(f"{local_path} cannot be loaded: {error}") from error
    return Resume(
        step,
        Path(url) / step_name(step),
        found.manifest,
        partial(coordinator.report_damage, step, found.digest),
        coordinator.memory,
        coordinator.report_load,
        StoredFiles.named_by(url, found),
    )


@dataclass(frozen=True)
class CommittedStep:
    """A committed checkpoint; each file is checked against the manifest before it is read."""

    resume: Resume
    folder: str

    @property
    def step(self) -> int | None:
        """See `ShardSource`."""
        return self.resume.step

    def saved_by(self, name: str) -> int | None:
        """How many ranks saved ``name``; None when it was not saved."""
        component = find_component(self.resume.manifest.files, name, self.folder)
        return None if component is None else component.world_size

    def read(self, name: str, rank: int, world_size: int) -> Any:
        """See `ShardSource`."""
        with StepFiles(self.resume) as files:
            return self.read_from(files, name, rank, world_size)

    def read_from(self, files: StepFiles, name: str, rank: int, world_size: int) -> Any:
        """As `read`, with files that the caller has open."""
        path = rank_shard_path(self.resume, name, rank, world_size, self.folder)
        return read_shard(self.resume, files, path)

    def own_paths(self, names: Iterable[str], rank: int, world_size: int) -> list[str]:
        """The files that the rank of this number saved; none where another number of ranks did."""
        components = [find_component(self.resume.manifest.files, n, self.folder) for n in names]
        return [
            found.path(rank)
            for found in components
            if found is not None and found.is_saved_by(rank, world_size)
        ]


@dataclass(frozen=True)
class ForeignDirectory:
    """A folder that verl's own manager wrote; unverified, and no code of it runs."""

    path: Path

    @property
    def step(self) -> int | None:
        """See `ShardSource`."""
        return None

    def read(self, name: str, rank: int, world_size: int) -> Any:
        """See `ShardSource`."""
        file = self.path / shard_file_name(name, rank, world_size)
        if not file.is_file():
            raise CorruptCheckpointError(
                f"{file} is missing; expected shards of {world_size} ranks, as verl names them"
            )
        allow_dtensors()
        with torch.serialization.safe_globals(_NUMPY_DATA):
            return torch.load(file, map_location="cpu", weights_only=True)
