"""Whole checkpoints of verl's MegatronEngine, committed by the run's monitor."""

import json
import logging
import socket
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.checkpoint.errors import (
    LoadFailedError,
    LoadPeerLostError,
    StateMismatchError,
    UnsupportedPlaceError,
)
from trainsync.checkpoint.load.account import LoadedBytes, report
from trainsync.checkpoint.load.reshard.shard_files import Component, find_component
from trainsync.checkpoint.load.resume import Resume
from trainsync.checkpoint.load.step_files import StepFiles
from trainsync.checkpoint.load.verify import Need, assign, verify
from trainsync.checkpoint.megatron_shards import describe
from trainsync.dist.agreement import Agreement
from trainsync.dist.group_agreement import open_agreement
from trainsync.engines.adapt import adapt
from trainsync.engines.checkpoints.arguments import ACTOR, SaveTarget, refuse_hdfs
from trainsync.engines.checkpoints.model_saves import ModelSaves
from trainsync.engines.checkpoints.retention import MonitoredRetention
from trainsync.engines.checkpoints.save_plan import (
    ENGINE,
    EXTRA,
    HF_MODEL,
    OPTIMIZER,
    ModelMode,
    SavePlan,
)
from trainsync.engines.checkpoints.shard_source import committed_step, is_elsewhere
from trainsync.engines.checkpoints.step_commits import StepCommits
from trainsync.engines.megatron.layout import ParallelLayout
from trainsync.engines.megatron.loading import component_of, load_state
from trainsync.engines.megatron.saving import save_training
from trainsync.engines.megatron.state_dicts import (
    MODEL,
    layout_file,
    save_by_engine,
    save_weights,
)
from trainsync.engines.megatron.step_shards import StepShards
from trainsync.engines.megatron.training import can_stage, can_stage_random_numbers
from trainsync.engines.protocol import SUPPORTED
from trainsync.engines.verl.adapters import VerlMegatronEngine

logger = logging.getLogger(__name__)

_STAGED: Final = {"optimizer": OPTIMIZER, "extra": EXTRA}
"""verl's names → components."""

_LOAD_SECONDS: Final = 1800.0


class MegatronCheckpoints(MonitoredRetention):
    """Saves and loads a MegatronEngine through the run, by verl's ``checkpoint`` configuration.

    Weights, optimizer with schedule, and random numbers are staged, and written in the background;
    the weights are the step's state dict, which explorers may take. A Hugging Face export
    (``hf_model``), and the state of an optimizer other than Megatron's distributed one, the engine
    writes for itself, into the save's staging directory, while training waits. One commit covers it
    all.

    Weights, optimizer and schedule are loaded into any parallel layout; random numbers too, but in
    another layout than the one that saved them generators start anew. What the engine wrote for
    itself goes only into the layout that saved it.
    The weights of a step whose state dict this process has saved already are not saved again.

    Args:
        engine: verl's MegatronEngine after ``initialize``, which trains.
        coordinator: of this rank; its directory is the run's. A critic's has the prefix
            ``critic_``.
        max_to_keep: checkpoints that the run keeps; None keeps all.
        commits: see `FSDPCheckpointManager`.

    Raises:
        TypeError: another engine, one that only infers, or one whose weights are not all in
            Megatron's ``sharded_state_dict`` (LoRA, Megatron-FSDP).
    """

    def __init__(
        self,
        engine: Any,
        coordinator: CheckpointCoordinator,
        max_to_keep: int | None = None,
        commits: StepCommits | None = None,
    ) -> None:
        trained = adapt(engine)
        if not isinstance(trained, VerlMegatronEngine) or trained.checkpoint_manager is None:
            raise TypeError(
                f"{type(engine).__name__} has no checkpoint manager of Megatron; expected an "
                f"initialised MegatronEngine of {SUPPORTED} that trains"
            )
        if trained.writes_for_itself:
            raise TypeError(
                f"{type(engine).__name__} has a LoRA adapter of Megatron-Bridge, or is sharded by "
                "Megatron-FSDP; expected neither: their checkpoints do not go through the run"
            )
        self.max_to_keep = max_to_keep
        self.previous_saved_paths = []
        self.rank = coordinator.rank
        self._engine = VerlMegatronEngine(_AsVerlMadeIt(engine))
        self.coordinator = coordinator
        self._saves = ModelSaves(coordinator, commits)

    def save_checkpoint(
        self,
        local_path: str | None,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
    ) -> None:
        """Save this rank's part of the checkpoint of ``global_step``.

        Returns when what is staged may change, and what the engine writes is written. It is
        complete when the monitor has committed it. A step that was saved before is not saved again.

        Args:
            local_path: ``<run directory>/global_step_N/actor``, of this step (a critic's:
                ``…/critic``); in a bucket its URL for the directory; None does nothing.
            hdfs_path: refused.
            max_ckpt_to_keep: only compared with the run's ``maxToKeep``, which counts.

        Raises:
            ValueError: an argument is not as its line in Args says.
            UnsupportedPlaceError: the engine would write a part for itself, and the run's
                checkpoints are in a bucket.
            PeerFailedError: another rank failed before the engine began to write.
            CheckpointError, MonitorError: this rank, or an earlier save.
        """
        if local_path is None:
            return
        staged = self._saves.stage(
            local_path,
            global_step,
            partial(self._plan, hdfs_path),
            partial(self._stage, global_step),
        )
        if staged is None:
            return
        plan, taken = staged
        # Before the engine writes: a rank that fails in it then aborts what is known.
        self._saves.register(plan, global_step, tolerant=not all(taken))
        if plan.by_engine:
            save_by_engine(
                self._engine,
                ENGINE,
                plan.by_engine,
                plan.folder,
                global_step,
                self.coordinator,
                ParallelLayout(),
                is_state_dict=False,
            )
        self._saves.steps.last = global_step
        self.register_checkpoint(local_path, max_ckpt_to_keep)

    def load_checkpoint(
        self,
        local_path: str | None,
        hdfs_path: str | None = None,
        del_local_after_load: bool | int = False,
    ) -> None:
        """Load this rank's part of what ``load_contents`` names.

        In the run's directory: the committed checkpoint, after every file's digest was checked.
        Elsewhere: what the engine itself saved there, unverified, with a warning.

        Args:
            local_path: None does nothing.
            hdfs_path: refused.
            del_local_after_load: verl means local copies of remote files, of which there are none;
                no checkpoint is ever deleted.

        Raises:
            ValueError: an argument is not as its line in Args says.
            CorruptCheckpointError: not committed, or not what the manifest says.
            StateMismatchError: another model or optimizer; or another parallel layout, and the
                engine wrote a part for itself that is to be loaded. Names both layouts.
            LoadFailedError: another rank failed; names it, and its cause.
        """
        if local_path is None:
            return
        refuse_hdfs(hdfs_path)
        if is_elsewhere(local_path, self.coordinator):
            self._engine.load_checkpoint(Path(local_path))
            return
        began = time.monotonic()
        wanted = self._engine.checkpoint_manager.checkpoint_load_contents
        ranks = open_agreement("load", _LOAD_SECONDS, LoadFailedError, LoadPeerLostError)
        found = _Committed(local_path, self.coordinator, wanted)
        answers = ranks.do("opening the checkpoint", found.open)
        needs = [Need(host, frozenset(paths)) for host, paths in map(json.loads, answers)]
        sizes = found.sizes
        ranks.do("checking the files", lambda: found.check(assign(needs, sizes)[ranks.rank]))
        read = self._load_staged(found, ranks, began, with_model=MODEL in wanted)

        def load_rest() -> str:
            if found.rest:
                with self._engine.loading_only(*found.rest):
                    self._engine.load_checkpoint(found.path)
            self._saves.steps.last = None
            return read.to_json()

        everyone = ranks.do("ending the load", load_rest)
        if self.rank == 0:
            logger.info("step %d: %s", found.resume.step, read.describe(found.resume))
            report(found.resume, began, map(LoadedBytes.parse, everyone))

    def wait_on_save_thread(self, timeout: float = 1800.0) -> None:
        """Wait until what this rank saved is written and, on rank 0, committed.

        Raises:
            SaveTimeoutError: ``timeout`` seconds were not enough.
            CheckpointError, MonitorError: a save failed.
        """
        self._saves.steps.wait(timeout)

    # -- inside -------------------------------------------------------------------------------

    def _load_staged(
        self, found: "_Committed", ranks: Agreement, began: float, *, with_model: bool
    ) -> LoadedBytes:
        """Load what the coordinator wrote, from memory where it lies there.

        Args:
            began: the load, by `time.monotonic`.

        Returns:
            The bytes that this rank read; what an engine reads for itself is not among them.
        """
        components = dict(found.staged)
        if with_model:
            components[MODEL] = component_of(found.resume, MODEL, found.folder)
        if not components:
            return LoadedBytes()
        with StepFiles(found.resume, began + _LOAD_SECONDS) as files:
            shards = StepShards(found.resume, files, ranks)
            shards.bring(components.values(), _LOAD_SECONDS / 4)
            schedule = self._restores_schedule
            load_state(self._engine, shards, components, logger, with_schedule=schedule)
            return shards.bytes

    def _plan(self, hdfs_path: str | None, place: SaveTarget) -> SavePlan:
        refuse_hdfs(hdfs_path)
        contents = list(self._engine.checkpoint_manager.checkpoint_save_contents)
        if not contents:
            raise ValueError("save_contents names nothing to save")
        staged, by_engine = [], []
        for name in contents:
            if name == "optimizer" and can_stage(self._engine.optimizer):
                staged.append(OPTIMIZER)
            elif name == "extra" and can_stage_random_numbers():
                staged.append(EXTRA)
            elif name != MODEL:
                by_engine.append(name)
        if by_engine and isinstance(self.coordinator.where, str):
            raise UnsupportedPlaceError(
                f"{', '.join(by_engine)} among save_contents is written by Megatron's engine "
                "itself, which cannot read it from a bucket; expected save_contents=[model, "
                "optimizer, extra] with the distributed optimizer on the device, or a run on a "
                "volume"
            )
        model = ModelMode.NONE
        if MODEL in contents:
            # Explorers take the actor's weights; weights alone need a participant of their own.
            for_explorers = self._saves.model == ACTOR and bool(staged or by_engine)
            model = ModelMode.STATE_DICT if for_explorers else ModelMode.OWN
        return SavePlan(
            place.folder, model, tuple(staged), by_engine=tuple(by_engine), held=place.held
        )

    def _stage(self, step: int, plan: SavePlan) -> bool:
        """Stage the components that are not the engine's to write.

        Returns:
            whether the coordinator took all of them.

        Raises:
            What `CheckpointCoordinator.save_async` raises.
        """
        taken = True
        coordinator, engine, layout = self.coordinator, self._engine, ParallelLayout()
        if plan.saves_model:
            taken = save_weights(
                engine,
                plan.folder,
                step,
                coordinator,
                layout,
                is_state_dict=plan.saves_state_dict,
                with_checkpoint=True,
            )
        return save_training(engine, plan.components, plan.folder, step, coordinator) and taken

    @property
    def _restores_schedule(self) -> bool:
        """verl's ``optim.use_checkpoint_opt_param_scheduler``: else it begins its schedule anew."""
        manager = self._engine.checkpoint_manager
        return bool(getattr(manager, "use_checkpoint_opt_param_scheduler", True))


class _AsVerlMadeIt:
    """An engine with its present methods, also when others take their place later."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.save_checkpoint = engine.save_checkpoint
        self.load_checkpoint = engine.load_checkpoint

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


class _Committed:
    """A committed checkpoint, and which of its parts the engine reads.

    Attributes:
        staged: components beside the model that were staged, where they are wanted.
        rest: verl's names of what the engine wrote for itself, and is to read.
    """

    resume: Resume
    folder: str
    staged: dict[str, Component]
    rest: tuple[str, ...]

    def __init__(
        self, local_path: str, coordinator: CheckpointCoordinator, wanted: Sequence[str]
    ) -> None:
        self._local_path = local_path
        self._coordinator = coordinator
        # The weights are those that were staged; the engine would take an export's over them.
        ours = {MODEL, HF_MODEL} if MODEL in wanted else set()
        self._wanted = [name for name in wanted if name not in ours]

    @property
    def path(self) -> Path:
        """Where the engine finds it."""
        return self.resume.path / self.folder

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of every file of the step."""
        return {entry.path: entry.bytes for entry in self.resume.manifest.files}

    def open(self) -> str:
        """Find it, and compare the layouts; returns what this rank's host has to check."""
        found = committed_step(self._local_path, self._coordinator)
        self.resume, self.folder = found.resume, found.folder
        self.staged = {}
        rest = []
        for name in self._wanted:
            component = find_component(
                self.resume.manifest.files, _STAGED.get(name, name), self.folder
            )
            if name in _STAGED and component is not None:
                self.staged[_STAGED[name]] = component
            else:
                rest.append(name)
        self.rest = tuple(rest)
        if self.rest and self.resume.store is not None:
            raise StateMismatchError(
                f"{self._local_path} has no {', '.join(self.rest)}; expected load_contents without "
                "them, or a checkpoint that was saved with them"
            )
        if not self.rest:
            return json.dumps([socket.gethostname(), []])
        self._same_layout()
        # The engine may open any of the files, so all of them count, on every host.
        return json.dumps([socket.gethostname(), sorted(self.sizes)])

    def check(self, paths: list[str]) -> str:
        """See that files are what the manifest says. Raises `CorruptCheckpointError`."""
        for path in paths:
            verify(self.resume, path)
        return ""

    def _same_layout(self) -> None:
        live = ParallelLayout()
        path = f"{self.folder}/{layout_file(0)}"
        if path not in self.sizes:
            raise StateMismatchError(
                f"{self._local_path} has no {', '.join(self.rest)} of a Megatron engine; expected "
                f"{path}, which is saved with them"
            )
        verify(self.resume, path)
        saved = json.loads((self.resume.path / path).read_text())
        if {name: saved.get(name) for name in live.sizes} != live.sizes:
            raise StateMismatchError(
                f"{', '.join(self.rest)} of {self._local_path} were saved by {describe(saved)} "
                f"and are loaded by {live}; expected the same layout, or load_contents=[model]: "
                "what an engine wrote for itself goes into no other"
            )
