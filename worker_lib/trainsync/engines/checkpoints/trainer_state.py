"""The state of verl's trainer itself (dataloader, TransferQueue), as a part of each commit."""

import logging
import shutil
from pathlib import Path
from typing import Final

from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.engines.checkpoints.step_commits import StepCommits
from trainsync.engines.verl.arguments import ACTOR, CRITIC, TRAINER

logger = logging.getLogger(__name__)

_MODELS: Final = frozenset({ACTOR, CRITIC})


class TrainerState:
    """Takes the files that verl's trainer wrote into the directory that it was given for a save.

    Args:
        coordinator: of this rank; rank 0 takes it.
        commits: of the models that were saved with it.
    """

    def __init__(self, coordinator: CheckpointCoordinator, commits: StepCommits) -> None:
        self._coordinator = coordinator
        self._commits = commits

    def save(self, path: Path, step: int) -> None:
        """Move the files beside ``path`` into the step in the background, and register the step.

        Raises:
            CheckpointError, MonitorError: an earlier save failed.
            ValueError: no model was saved at the step; or the engine is a critic's.
        """
        if prefix := self._coordinator.component_prefix:
            raise ValueError(
                f"the trainer's own state of step {step} was given to the engine of {prefix!r}; "
                "expected the actor's engine"
            )
        if self._coordinator.rank == 0 and self._commits.registered != step:
            self._coordinator.save_async(
                TRAINER, lambda work: _move(path.parent, work), step, subdir=""
            )
        self._commits.finish(step, [(TRAINER, 0)])


def is_trainers(path: str) -> bool:
    """Whether a file of a step is the trainer's; ``path`` is relative to the step."""
    return path.partition("/")[0] not in _MODELS


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
