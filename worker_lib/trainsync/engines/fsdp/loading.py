"""Load a checkpoint on all ranks: no live tensor changes before every rank has read its part."""

import logging
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.checkpoint.errors import LoadFailedError, LoadPeerLostError
from trainsync.checkpoint.load.account import report
from trainsync.checkpoint.load.loading import load_sharded
from trainsync.checkpoint.load.step_files import StepFiles
from trainsync.checkpoint.memory.neighbour.fetching import bring
from trainsync.dist.group_agreement import open_agreement
from trainsync.engines.agree import on_all_ranks
from trainsync.engines.checkpoints.save_plan import EXTRA, MODEL, OPTIMIZER
from trainsync.engines.checkpoints.shard_source import CommittedStep, ShardSource, open_source
from trainsync.engines.fsdp import training_parts
from trainsync.engines.fsdp.state import fsdp_version
from trainsync.engines.fsdp.training_parts import State, TrainedParts

logger = logging.getLogger(__name__)

_STAGED_SECONDS = 600.0  # limit for copies that run behind training
_LOAD_SECONDS = 1800.0


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
        began = time.monotonic()
        sources: list[ShardSource] = []

        def find() -> tuple[int | None, bool]:
            refuse()
            source = open_source(local_path, self._coordinator)
            sources.append(source)
            return source.step, self._reshards(source, names)

        step, reshards = on_all_ranks(find, doing)[0]
        (source,) = sources
        if isinstance(source, CommittedStep) and not reshards:
            self._load_committed(source, names, doing, began)
        elif isinstance(source, CommittedStep):
            on_all_ranks(self._wait_staged, doing)
            on_all_ranks(partial(self._reshard, source, names), doing)
        else:
            self._load_parts(source.read, names, doing)
        return step

    def _load_committed(
        self, source: CommittedStep, names: set[str], doing: str, began: float
    ) -> None:
        """Load what as many ranks saved, from memory where it lies there."""
        resume, coordinator = source.resume, self._coordinator
        own = partial(source.own_paths, names, coordinator.rank, coordinator.world_size)
        with StepFiles(resume, began + _LOAD_SECONDS) as files:
            ranks = open_agreement("load", _LOAD_SECONDS, LoadFailedError, LoadPeerLostError)
            bring(resume, own, files.memory, ranks, _LOAD_SECONDS / 4)
            self._load_parts(partial(source.read_from, files), names, doing)
            read = files.bytes(own())
        everyone = on_all_ranks(lambda: read, doing)
        if coordinator.rank == 0:
            logger.info(
                "step %d: %s loaded; %s",
                resume.step,
                ", ".join(sorted(names)),
                read.describe(resume),
            )
            report(resume, began, everyone)

    def _load_parts(
        self, read: Callable[[str, int, int], State], names: set[str], doing: str
    ) -> None:
        """Load parts into the live state, which does not change before every rank has read its own.

        Args:
            read: see `ShardSource`.
        """
        coordinator = self._coordinator
        parts: dict[str, State] = {}

        def read_all() -> None:
            for name in names:
                parts[name] = read(name, coordinator.rank, coordinator.world_size)
            self._wait_staged()

        def restore() -> None:
            training_parts.load(self._trained, parts, self._complete, self._load_rng)

        on_all_ranks(read_all, doing)
        on_all_ranks(restore, doing)

    def _wait_staged(self) -> None:
        """The last step that can fail on one rank alone; a collective may follow."""
        self._coordinator.wait_staged(_STAGED_SECONDS)

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
