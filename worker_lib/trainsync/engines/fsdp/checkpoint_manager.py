"""verl's FSDPCheckpointManager, saving in the background and committing by the run's monitor."""

import logging
from functools import partial
from typing import Any

import torch
from verl.utils.checkpoint.fsdp_checkpoint_manager import (
    FSDPCheckpointManager as VerlFSDPCheckpointManager,
)

from trainsync.api.spec import SyncMethod
from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.checkpoint.save.registration import Participants, all_ranks
from trainsync.engines.agree import on_all_ranks
from trainsync.engines.checkpoints.arguments import (
    ACTOR,
    MERGED,
    SaveTarget,
    reference_step,
    refuse_hdfs,
    refuse_unknown,
    run_of,
)
from trainsync.engines.checkpoints.model_saves import ModelSaves
from trainsync.engines.checkpoints.retention import MonitoredRetention
from trainsync.engines.checkpoints.save_plan import (
    EXTRA,
    MODEL,
    OPTIMIZER,
    ModelMode,
    SavePlan,
    choose_model_mode,
    state_dict_exists,
)
from trainsync.engines.checkpoints.step_commits import StepCommits
from trainsync.engines.fsdp import training_parts
from trainsync.engines.fsdp.loading import PartsLoader
from trainsync.engines.fsdp.saving import PartsSaver, states_of
from trainsync.engines.fsdp.state_dicts import fsdp_upload_state_dict
from trainsync.engines.fsdp.training_parts import TrainedParts
from trainsync.engines.hf import export as hf_export
from trainsync.engines.lora.merging import chosen_state, has_adapter
from trainsync.engines.module_engine import TrainedModule
from trainsync.engines.protocol import LoRAWeights

logger = logging.getLogger(__name__)


class FSDPCheckpointManager(MonitoredRetention, VerlFSDPCheckpointManager):
    """Takes the place of ``engine.checkpoint_manager``: `install_checkpoint_manager` puts it there.

    Layout and file names are verl's, so its own manager and its model merger read what is
    committed. Every method is called on all ranks together. Saving, uploading and loading fail on
    all of them when they fail on one; only one that fails inside a collective of torch's keeps the
    others there, as long as the process group allows. A background failure reaches the next call.

    Differences that a user of verl's manager meets:

    - a save is complete when the monitor has committed it, not when the call returns;
    - old checkpoints are removed by the monitor (``maxToKeep`` of the run), never from here;
    - ``load_checkpoint`` refuses what is in the run's directory and not committed, or damaged.

    Args:
        args, kwargs: as verl's manager takes them.
        coordinator: of this rank; its directory is the run's. A critic's has the prefix
            ``critic_``.
        synchronizer: handle of the run's Synchronizer, for `upload_state_dict` and the first
            `save_state_dict`; None without explorers.
        sync_method: how explorers get weights, ``spec.sync.method``; None: as the coordinator
            says, else ``memory``.
        max_to_keep: checkpoints that the run keeps; None keeps all.
        ray_namespace: in place of the two first, of the run that the environment describes.
        merges_lora: state dicts and uploads have the LoRA adapter merged into the base model's
            weights, as verl's ``lora.merge`` means it. Checkpoints have both apart, to go on from;
            so a state dict is then no part of its step's checkpoint, and lies in ``merged/``.
        commits: shared by the managers of all models that are committed together; None: this model
            is the only one.

    Raises:
        TypeError: an unknown argument, or no coordinator; says what was expected.
        ValueError: the coordinator is another rank's, or the namespace another run's.
    """

    def __init__(
        self,
        *args: Any,
        coordinator: CheckpointCoordinator | None = None,
        synchronizer: Any = None,
        sync_method: SyncMethod | None = None,
        max_to_keep: int | None = None,
        ray_namespace: str | None = None,
        merges_lora: bool = False,
        commits: StepCommits | None = None,
        **kwargs: Any,
    ) -> None:
        refuse_unknown(VerlFSDPCheckpointManager.__init__, kwargs)
        coordinator, synchronizer = run_of(coordinator, synchronizer, ray_namespace)
        super().__init__(*args, **kwargs)
        if (coordinator.rank, coordinator.world_size) != (self.rank, self.world_size):
            raise ValueError(
                f"the coordinator is of rank {coordinator.rank} of {coordinator.world_size}, the "
                f"process group's is rank {self.rank} of {self.world_size}; expected the same"
            )
        self.coordinator = coordinator
        self.synchronizer = synchronizer
        self.sync_method = sync_method or coordinator.sync_method or SyncMethod.MEMORY
        self.max_to_keep = max_to_keep
        self.previous_state_dict_step: int | None = None
        self._state_dict_step: int | None = None  # the same, where a state dict is on the volume
        self._start_step = 0  # of a run that has loaded nothing
        self._uploaded_step: int | None = None
        self._skipped_state_dict: int | None = None
        merges = merges_lora and has_adapter(self.model)
        self._sent = LoRAWeights.MERGED if merges else LoRAWeights.ALL
        self._saves = ModelSaves(coordinator, commits)
        if isinstance(self.optimizer, torch.optim.Optimizer):
            coordinator.guard(self.optimizer)
        self._trained = TrainedParts(self.model, self.optimizer, self.lr_scheduler)
        self._saver = PartsSaver(coordinator, self.model, self.processing_class)
        self._loader = PartsLoader(
            coordinator,
            self._trained,
            # 0.9 fills in what some engines leave out of their optimizer's state.
            complete=getattr(self, "_backfill_optimizer_state", lambda state: state),
            load_rng=self.load_rng_state,
        )

    # -- saving -----------------------------------------------------------------------------

    def save_checkpoint(
        self,
        local_path: str | None,
        hdfs_path: str | int | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        save_as_hf: bool = False,
    ) -> None:
        """Save this rank's part of the checkpoint of ``global_step``; returns when it is staged.

        The weights are saved as the step's state dict, which explorers may take, and belong to
        the checkpoint too; when `save_state_dict` has saved them already they are not written
        again. A step that was saved before is not saved again.

        Args:
            local_path: ``<run directory>/global_step_N/actor``, of this step (a critic's:
                ``…/critic``); in a bucket its URL for the directory; None does nothing.
            hdfs_path: refused, but for a number, which is the reference's ``global_step``.
            max_ckpt_to_keep: only compared with the run's ``maxToKeep``, which counts.
            save_as_hf: export the whole model to ``huggingface/`` too, as ``hf_model`` among
                ``save_contents`` does.

        Raises:
            ValueError: an argument is not as its line in Args says.
            PeerFailedError: another rank failed.
            CheckpointError, MonitorError: this rank, or an earlier save.
        """
        others = max_ckpt_to_keep is not None or save_as_hf
        hdfs_path, global_step = reference_step(hdfs_path, global_step, others)
        if local_path is None:
            return
        staged = self._saves.stage(
            local_path,
            global_step,
            partial(self._plan, hdfs_path, global_step, save_as_hf),
            partial(self._stage, global_step),
        )
        if staged is None:
            return
        plan, answers = staged
        self._saves.steps.last = global_step
        complete = all(all(answer.values()) for answer in answers)
        if plan.saves_state_dict:
            self._note_state_dict(global_step, all(answer[MODEL] for answer in answers))
        if self.rank == 0:
            if plan.model is ModelMode.OWN_UNWATCHED:
                logger.warning(
                    "step %d: an earlier attempt committed a state dict of this step; the "
                    "checkpoint is committed only if its weights are the same",
                    global_step,
                )
            self.register_checkpoint(local_path, max_ckpt_to_keep)
        # A save that a rank skipped for want of memory is aborted, as it was configured to be.
        tolerant = not complete or plan.model is ModelMode.OWN_UNWATCHED
        self._saves.register(plan, global_step, tolerant=tolerant)

    def save_state_dict(self, local_path: str | None, global_step: int = 0) -> None:
        """Save this rank's part of the step's state dict, once; returns when it is staged.

        Unlike `fsdp_save_state_dict`, the ranks agree on it, and rank 0 registers the step.

        At the step that training starts from (0, or the one that was loaded) explorers have, or
        find, the weights elsewhere: nothing is written, and with ``memory`` the Synchronizer gets
        the version; with ``nccl`` a `WeightPublisher` has to send it. With ``checkpoint``
        explorers take what is committed: the weights of step 0 are saved where there is a
        Synchronizer, those of a step that was loaded are announced already.

        Args:
            local_path: ``<run directory>/global_step_N/actor``; None does nothing.

        Raises:
            As `save_checkpoint`.
        """
        if local_path is None:
            return
        doing = f"saving the state dict of step {global_step}"
        check = partial(self._check_state_dict, local_path, global_step)
        begins = self.previous_state_dict_step is None and global_step == self._start_step
        folder, exists = on_all_ranks(partial(check, begins), doing)[0]
        if global_step in (self.previous_state_dict_step, self._skipped_state_dict):
            return
        by_commit = self.synchronizer is not None and self.sync_method is SyncMethod.CHECKPOINT
        if begins and (exists or (global_step == 0 and not by_commit)):
            self.previous_state_dict_step = global_step
            self._state_dict_step = global_step if exists else None
            if self.synchronizer is not None and self.sync_method is SyncMethod.MEMORY:
                self.upload_state_dict(global_step)
            return
        complete = all(on_all_ranks(partial(self._stage_state_dict, folder, global_step), doing))
        self._note_state_dict(global_step, complete)
        if self.rank == 0:
            state_dict = tuple(all_ranks(MODEL, world_size=self.world_size))
            participants = Participants(global_step, state_dict=state_dict)
            self._saves.commits.watch.register(participants, tolerant=not complete)

    def upload_state_dict(self, global_step: int) -> None:
        """Give the Synchronizer this rank's part of version ``global_step``; there is no gather.

        A version that was uploaded before is not uploaded again.

        Raises:
            ValueError: there is no Synchronizer, or ``sync_method`` is not ``memory``: explorers
                could not take such a version.
            PeerFailedError: another rank failed.
            What `fsdp_upload_state_dict` raises.
        """
        on_all_ranks(partial(self._upload, global_step), f"uploading version {global_step}")
        self._uploaded_step = global_step

    def wait_on_save_thread(self, timeout: float = 1800.0) -> None:
        """Wait until what this rank saved is written and, on rank 0, committed.

        Raises:
            SaveTimeoutError: ``timeout`` seconds were not enough.
            CheckpointError, MonitorError: a save failed.
        """
        self._saves.steps.wait(timeout)

    # -- loading ------------------------------------------------------------------------------

    def load_checkpoint(
        self,
        local_path: str | None,
        hdfs_path: str | None = None,
        del_local_after_load: bool | int = False,
    ) -> None:
        """Load this rank's part of what ``load_contents`` names.

        In the run's directory: the committed checkpoint, after every file's digest was checked.
        Elsewhere: a directory that verl wrote, unverified, with a warning. Either way nothing in
        a file is executed. What another number of ranks committed is loaded by any number, with
        FSDP2; random generators then start anew.

        Args:
            local_path: None does nothing.
            hdfs_path: refused.
            del_local_after_load: verl means local copies of remote files, of which there are
                none; no checkpoint is ever deleted.

        Raises:
            ValueError: an argument is not as its line in Args says.
            CorruptCheckpointError: not committed, or not what the manifest says.
            WorldSizeMismatchError, StateMismatchError: it does not fit; says what was expected.
            PeerFailedError, LoadFailedError: another rank failed.
        """
        if local_path is None:
            return

        def refuse() -> None:
            refuse_hdfs(hdfs_path)
            if self.should_load_optimizer and self.optimizer is None:
                raise ValueError(
                    "'optimizer' is in load_contents, but the manager has no optimizer"
                )

        wanted = {
            MODEL: self.should_load_model,
            OPTIMIZER: self.should_load_optimizer,
            EXTRA: self.should_load_extra,
        }
        names = {name for name, loaded in wanted.items() if loaded}
        step = self._loader.load(local_path, names, refuse)
        if step is not None:
            self._start_step = step
            self.previous_state_dict_step = self._state_dict_step = None
            self._saves.steps.last = None

    # -- inside -------------------------------------------------------------------------------

    def _note_state_dict(self, step: int, complete: bool) -> None:
        if complete:
            self.previous_state_dict_step = self._state_dict_step = step
        else:
            self._skipped_state_dict = step

    def _check_state_dict(self, local_path: str, step: int, begins: bool) -> tuple[str, bool]:
        """Where the step's state dict goes; and, of the step that training starts from, whether one
        is committed already: rank 0 alone looks."""
        self._saves.steps.check()
        if self._saves.model != ACTOR:
            raise ValueError(
                f"explorers take the actor's weights, not those of a {self._saves.model}"
            )
        folder = self._saves.place(local_path, step).folder
        if self._sent is LoRAWeights.MERGED:
            folder = MERGED
        looks = begins and self.rank == 0
        return folder, looks and state_dict_exists(self.coordinator.where, step)

    def _stage_state_dict(self, folder: str, step: int) -> bool:
        """Whether the coordinator took it."""
        weights = chosen_state(self.model, self._sent)
        return self._saver.save_state_dict(folder, step, weights)

    def _upload(self, step: int) -> None:
        if self.synchronizer is None:
            raise ValueError(
                "upload_state_dict needs the run's Synchronizer: make the manager with "
                "synchronizer=context.synchronizer()"
            )
        if self.sync_method is not SyncMethod.MEMORY:
            instead = {
                SyncMethod.CHECKPOINT: "save_state_dict, since explorers take committed weights",
                SyncMethod.NCCL: "WeightPublisher.publish, since explorers take broadcasts",
                SyncMethod.STORE: "WeightPublisher.publish, since explorers read a store",
            }
            raise ValueError(
                f"upload_state_dict is for sync.method memory, and explorers get weights by "
                f"{self.sync_method.value}; expected {instead[self.sync_method]}"
            )
        if self._uploaded_step != step:
            module = TrainedModule(self.model, lora=self._sent)
            fsdp_upload_state_dict(module, self.synchronizer, step, logger)

    def _stage(self, step: int, plan: SavePlan) -> dict[str, bool]:
        """Whether the coordinator took each component of this rank.

        What is gathered needs all ranks: one that fails in a collective still joins the next.
        """
        self.previous_global_step = step  # type: ignore[assignment] # verl says None
        full: dict[str, torch.Tensor] = {}
        problem = None
        try:
            if plan.export:
                full = hf_export.gather_full_state(self.model, self.rank)
        except Exception as error:  # noqa: BLE001 - raised below
            problem = error
        try:
            adapter_only = self._adapter_only()
            states = states_of(plan, self._trained, self.get_rng_state, adapter_only=adapter_only)
        finally:
            if problem is not None:
                raise problem
        return self._saver.save(plan, step, states, full)

    def _plan(self, hdfs_path: Any, step: int, save_as_hf: bool, place: SaveTarget) -> SavePlan:
        refuse_hdfs(hdfs_path)
        if self.should_save_optimizer and self.optimizer is None:
            raise ValueError("'optimizer' is in save_contents, but the manager has no optimizer")
        wanted = {OPTIMIZER: self.should_save_optimizer, EXTRA: self.should_save_extra}
        components = tuple(name for name, saved in wanted.items() if saved)
        export = self.should_save_hf_model or save_as_hf
        if not (components or export or self.should_save_model):
            raise ValueError("save_contents names nothing to save")
        # A critic's weights are no state dict, since explorers take the actor's; and one with the
        # adapter merged into it is nothing to go on from.
        apart = self._saves.model != ACTOR or self._sent is LoRAWeights.MERGED
        in_store = isinstance(self.coordinator.where, str)  # where every save has its own objects
        mode = choose_model_mode(
            step,
            wanted=self.should_save_model,
            adapter_only=self._adapter_only(),
            alone=apart or not (components or export),
            saved=self._state_dict_step,
            skipped=self._skipped_state_dict,
            exists=not (apart or in_store) and state_dict_exists(self.coordinator.where, step),
        )
        return SavePlan(place.folder, mode, components, export, held=place.held)

    def _adapter_only(self) -> bool:
        # 0.8 has no such setting.
        wanted = bool(getattr(self, "should_save_lora_only", False))
        return wanted and training_parts.has_adapter(self.model)
