"""Whole checkpoints of verl's MegatronEngine, committed by the run's monitor."""

import json
import logging
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.checkpoint.errors import StateMismatchError
from trainsync.checkpoint.load.agreement import open_agreement
from trainsync.checkpoint.load.resume import Resume
from trainsync.checkpoint.load.verify import Need, assign, verify
from trainsync.checkpoint.megatron_shards import describe
from trainsync.checkpoint.save.registration import Participants, all_ranks
from trainsync.engines.agree import agree
from trainsync.engines.checkpoints.paths import inside_run
from trainsync.engines.checkpoints.saved_steps import SavedSteps
from trainsync.engines.checkpoints.shard_source import Tell, committed_step
from trainsync.engines.megatron.layout import ParallelLayout
from trainsync.engines.megatron.loading import megatron_load_state_dict
from trainsync.engines.megatron.state_dicts import MODEL, layout_file, save_by_engine, save_weights
from trainsync.engines.protocol import SUPPORTED, adapt
from trainsync.engines.step_commits import StepCommits
from trainsync.engines.verl.adapters import VerlMegatronEngine
from trainsync.engines.verl.arguments import ACTOR, Place, model_of, model_place, refuse_hdfs
from trainsync.engines.verl.retention import MonitoredRetention

logger = logging.getLogger(__name__)

HF_MODEL: Final = "hf_model"
"""verl's name for the weights as a Hugging Face directory."""

ENGINE: Final = "engine"
"""Component of what the engine writes for itself: optimizer, schedule, random numbers, …"""

_LOAD_SECONDS: Final = 1800.0


@dataclass(frozen=True)
class _Plan:
    """One checkpoint."""

    folder: str
    model: bool
    rest: tuple[str, ...]
    """What of ``save_contents`` the engine writes for itself."""
    is_state_dict: bool
    """Whether the weights are the step's state dict, which explorers take."""

    def participants(self, step: int, world_size: int, prefix: str) -> Participants:
        model = all_ranks(prefix + MODEL, world_size=world_size) if self.model else []
        engine = all_ranks(prefix + ENGINE, world_size=world_size) if self.rest else []
        if not self.is_state_dict:
            return Participants(step, checkpoint=(*model, *engine))
        return Participants(step, tuple(model), tuple(engine), reuse_state_dict=True)


class MegatronCheckpoints(MonitoredRetention):
    """Saves and loads a MegatronEngine through the run, by verl's ``checkpoint`` configuration.

    The weights are staged, and written in the background, as `megatron_save_state_dict` does it;
    they are the step's state dict, which explorers may take. What else ``save_contents`` names
    (optimizer and schedule, random numbers, a Hugging Face export) the engine writes for itself by
    Megatron's distributed checkpoints, into the save's staging directory, while training waits. One
    commit covers it all.

    Weights are loaded into any parallel layout, all else only into the one that it was saved by.
    A step whose state dict this process has saved already cannot be saved as a checkpoint besides:
    `StepNotIncreasingError`.

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
        self._of = model_of(coordinator.component_prefix)
        self._commits = commits or StepCommits(
            coordinator.directory, coordinator.watch(), coordinator.rank
        )
        self._saved = SavedSteps(coordinator, self._commits.watch)
        self._commits.join(self._of, self._saved)

    def save_checkpoint(
        self,
        local_path: str | None,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
    ) -> None:
        """Save this rank's part of the checkpoint of ``global_step``.

        Returns when the weights are staged and all else is written. It is complete when the monitor
        has committed it. A step that was saved before is not saved again.

        Args:
            local_path: ``<run directory>/global_step_N/actor``, of this step (a critic's:
                ``…/critic``); None does nothing.
            hdfs_path: refused.
            max_ckpt_to_keep: only compared with the run's ``maxToKeep``, which counts.

        Raises:
            ValueError: an argument is not as above.
            PeerFailedError: another rank failed before the engine began to write.
            CheckpointError, MonitorError: this rank, or an earlier save.
        """
        if local_path is None:
            return
        doing = f"saving step {global_step}"
        plan, problem = None, None
        try:
            self._saved.check()
            place = self._place(local_path, global_step)
            if global_step != self._saved.last:
                plan = self._plan(place, hdfs_path)
            layout = ParallelLayout()
        except Exception as error:  # noqa: BLE001 - raised on every rank
            problem = error
        plan = agree(plan, problem, doing)[0]
        if plan is None:
            return
        taken = True
        try:
            if plan.model:
                taken = save_weights(
                    self._engine,
                    plan.folder,
                    global_step,
                    self.coordinator,
                    layout,
                    is_state_dict=plan.is_state_dict,
                )
        except Exception as error:  # noqa: BLE001 - raised on every rank
            problem = error
        complete = all(agree(taken, problem, doing))
        # Before the engine writes: a rank that fails in it then aborts what is known.
        prefix = self.coordinator.component_prefix
        participants = plan.participants(global_step, self.coordinator.world_size, prefix)
        self._commits.add(self._of, participants, tolerant=not complete, held=place.held)
        if plan.rest:
            save_by_engine(
                self._engine,
                ENGINE,
                plan.rest,
                plan.folder,
                global_step,
                self.coordinator,
                layout,
                is_state_dict=False,
            )
        self._saved.last = global_step
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
            ValueError: an argument is not as above.
            CorruptCheckpointError: not committed, or not what the manifest says.
            StateMismatchError: another model; or another parallel layout, and not the weights alone
                are to be loaded. Names both layouts.
            LoadFailedError: another rank failed; names it, and its cause.
        """
        if local_path is None:
            return
        refuse_hdfs(hdfs_path)
        directory = self.coordinator.directory
        if inside_run(local_path, directory) is None:
            logger.warning(
                "%s is not in the run's directory %s: it is loaded without being verified",
                local_path,
                directory,
            )
            self._engine.load_checkpoint(Path(local_path))
            return
        wanted = self._engine.checkpoint_manager.checkpoint_load_contents
        # The weights are those that were staged; the engine would take an export's over them.
        ours = {MODEL, HF_MODEL} if MODEL in wanted else set()
        rest = tuple(name for name in wanted if name not in ours)
        ranks = open_agreement(_LOAD_SECONDS)
        found = _Committed(local_path, directory, rest, self.coordinator.report_damage)
        answers = ranks.do("opening the checkpoint", found.open)
        needs = [Need(host, frozenset(paths)) for host, paths in map(json.loads, answers)]
        sizes = found.sizes
        ranks.do("checking the files", lambda: found.check(assign(needs, sizes)[ranks.rank]))
        if MODEL in wanted:
            megatron_load_state_dict(
                self._engine, found.resume, logger, subdir=found.folder, timeout=_LOAD_SECONDS
            )
        if rest:
            with self._engine.loading_only(*rest):
                self._engine.load_checkpoint(found.path)
        self._saved.last = None

    def wait_on_save_thread(self, timeout: float = 1800.0) -> None:
        """Wait until what this rank saved is written and, on rank 0, committed.

        Raises:
            SaveTimeoutError: ``timeout`` seconds were not enough.
            CheckpointError, MonitorError: a save failed.
        """
        self._saved.wait(timeout)

    # -- inside -------------------------------------------------------------------------------

    def _place(self, local_path: str, step: int) -> Place:
        return model_place(local_path, self.coordinator.directory, step, self._of)

    def _plan(self, place: Place, hdfs_path: str | None) -> _Plan:
        refuse_hdfs(hdfs_path)
        contents = list(self._engine.checkpoint_manager.checkpoint_save_contents)
        if not contents:
            raise ValueError("save_contents names nothing to save")
        rest = tuple(name for name in contents if name != MODEL)
        explorers = self._of == ACTOR and MODEL in contents and bool(rest)
        return _Plan(place.folder, MODEL in contents, rest, is_state_dict=explorers)


class _AsVerlMadeIt:
    """An engine with the methods that it has now, whatever is put in their place later."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.save_checkpoint = engine.save_checkpoint
        self.load_checkpoint = engine.load_checkpoint

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


class _Committed:
    """A committed checkpoint, as far as the engine reads it for itself."""

    resume: Resume
    folder: str

    def __init__(self, local_path: str, directory: Path, rest: tuple[str, ...], tell: Tell) -> None:
        self._local_path = local_path
        self._tell = tell
        self._directory = directory
        self._rest = rest

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
        found = committed_step(self._local_path, self._directory, self._tell)
        self.resume, self.folder = found.resume, found.folder
        if not self._rest:
            return json.dumps([socket.gethostname(), []])
        self._same_layout()
        # The engine opens whatever it likes, so all files count, on every host.
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
                f"{self._local_path} has no {', '.join(self._rest)} of a Megatron engine; expected "
                f"{path}, which is saved with them"
            )
        verify(self.resume, path)
        saved = json.loads((self.resume.path / path).read_text())
        if {name: saved.get(name) for name in live.sizes} != live.sizes:
            raise StateMismatchError(
                f"{', '.join(self._rest)} of {self._local_path} were saved by {describe(saved)} "
                f"and are loaded by {live}; expected the same layout, or load_contents=[model]: "
                "the weights alone go into any"
            )
