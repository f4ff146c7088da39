"""Load a checkpoint on all ranks: no live tensor changes before every rank has read its part."""

import logging
from collections.abc import Callable
from pathlib import Path

from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.checkpoint.load.loading import load_sharded
from trainsync.engines.agree import on_all_ranks
from trainsync.engines.checkpoints.save_plan import EXTRA, MODEL, OPTIMIZER
from trainsync.engines.checkpoints.shard_source import CommittedStep, ShardSource, open_source
from trainsync.engines.fsdp import training_parts
from trainsync.engines.fsdp.state import fsdp_version
from trainsync.engines.fsdp.training_parts import State, TrainedParts

logger = logging.getLogger(__name__)

_STAGED_SECONDS = 600.0  # limit for copies that run behind training


class PartsLoader:
    """Loads a rank's model, optimizer and extra state.

    Args:
        complete: turns a saved optimizer state into a state that the optimizer accepts.
        load_rng: sets the random generators.
    """

    def __init__(
        self,
        coordinator: CheckpointCoordinator,
        trained: TrainedParts,
        complete: Callable[[State], State],
        load_rng: Callable[[State], None],
    ) -> None:
        self._coordinator = coordinator
        self._trained = trained
        self._complete = complete
        self._load_rng = load_rng

    def load(
        self, local_path: str | Path, names: set[str], refuse: Callable[[], None]
    ) -> int | None:
        """Returns the step, or None for a directory that is not of the run.

        Args:
            names: the parts to load, out of `MODEL`, `OPTIMIZER` and `EXTRA`.
            refuse: raises if the call's arguments are wrong.

        Raises:
            See `FSDPCheckpointManager.load_checkpoint`.
        """
        doing = f"loading {local_path}"
        parts: dict[str, State] = {}
        sources: list[ShardSource] = []

        def read() -> tuple[int | None, bool]:
            refuse()
            coordinator = self._coordinator
            source = open_source(
                local_path, coordinator.directory, coordinator.report_damage, coordinator.memory
            )
            sources.append(source)
            reshards = self._reshards(source, names)
            if not reshards:
                for name in names:
                    parts[name] = source.read(name, coordinator.rank, coordinator.world_size)
            # The last step that can fail on one rank alone; a collective may follow.
            coordinator.wait_staged(_STAGED_SECONDS)
            return source.step, reshards

        step, reshards = on_all_ranks(read, doing)[0]

        def restore() -> None:
            source = sources[0]
            if not reshards:
                training_parts.load(self._trained, parts, self._complete, self._load_rng)
            elif isinstance(source, CommittedStep):
                self._reshard(source, names)

        on_all_ranks(restore, doing)
        return step

    def _reshards(self, source: ShardSource, names: set[str]) -> bool:
        """Whether another number of ranks saved the step and these ranks can resume from it."""
        return (
            isinstance(source, CommittedStep)
            and source.saved_by(MODEL) not in (None, self._coordinator.world_size)
            and MODEL in names
            and fsdp_version(self._trained.module) != 1
        )

    def _reshard(self, source: CommittedStep, names: set[str]) -> None:
        loaded = load_sharded(
            source.resume,
            model=self._trained.module,
            optimizer=self._trained.optimizer if OPTIMIZER in names else None,
            scheduler=self._trained.scheduler if EXTRA in names else None,
            rng=EXTRA in names,
            subdir=source.folder,
        )
        if self._coordinator.rank == 0:
            logger.warning(
                "step %d was saved by %d ranks and is loaded by %d: restored %s",
                loaded.step,
                loaded.world_size,
                self._coordinator.world_size,
                ", ".join(loaded.restored),
            )
