"""Let the engines of verl save and load through a run."""

import functools
import logging
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from trainsync.api.spec import SyncMethod
from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.engines.adapt import adapt
from trainsync.engines.agree import on_all_ranks
from trainsync.engines.checkpoints.arguments import (
    ACTOR,
    CRITIC,
    TRAINER,
    component_prefix,
    place_of,
    total_steps,
)
from trainsync.engines.checkpoints.paths import inside_run
from trainsync.engines.checkpoints.shard_source import committed_step
from trainsync.engines.checkpoints.step_commits import StepCommits
from trainsync.engines.checkpoints.trainer_state import TrainerState, verify_trainers
from trainsync.engines.fsdp.checkpoint_manager import FSDPCheckpointManager
from trainsync.engines.megatron.checkpoints import MegatronCheckpoints
from trainsync.engines.protocol import LoRAWeights, is_megatron
from trainsync.runtime.context import RunContext

logger = logging.getLogger(__name__)

SUPPORTED = "verl 0.8 and 0.9"
LAST_SAVE_SECONDS: Final = 1800.0
_NEEDED = ("module", "optimizer", "lr_scheduler", "checkpoint_config", "checkpoint_manager")

Manager = FSDPCheckpointManager | MegatronCheckpoints

# One commit for each step, shared by all models that a process saves through the same run.
_COMMITS: "weakref.WeakKeyDictionary[RunContext, StepCommits]" = weakref.WeakKeyDictionary()


def install_checkpoint_manager(
    engine: Any,
    context: RunContext,
    synchronizer: Any = None,
    coordinator: CheckpointCoordinator | None = None,
    *,
    last_step: int | None = None,
    reports: bool = True,
) -> Manager:
    """Let ``engine.save_checkpoint`` and ``engine.load_checkpoint`` go through the run.

    Every rank calls this function. Rank 0 asks the monitor where to resume, once for each process;
    the monitor repairs the pointer that verl's trainers read. Rank 0 also reports each saved step.
    The save of the last step returns when this rank's part is written and, on rank 0, when the step
    is committed.

    A critic's engine (one with a value head) saves under ``global_step_N/critic``, in components
    ``critic_…``. Engines installed with the same ``context`` are committed together: a step is
    committed when the last engine has saved.

    Args:
        engine: verl's FSDPEngine or MegatronEngine after ``initialize``; on a worker it is
            ``worker.actor.engine``, and ``worker.engine`` of a critic's.
        context: the run; one for each process.
        synchronizer: see `FSDPCheckpointManager`; for FSDP only.
        coordinator: this rank's coordinator, in place of ``context.coordinator()``; for a critic
            made with ``component_prefix="critic_"``.
        last_step: the run's last step; None: the value of ``TRAINSYNC_VERL_TOTAL_STEPS``, else the
            optimizer's ``total_training_steps``.
        reports: whether rank 0 reports steps; False if the program reports them.

    Returns:
        the manager behind ``engine.save_checkpoint`` and ``engine.load_checkpoint``. For FSDP it is
            also ``engine.checkpoint_manager``; Megatron's own manager stays and writes all state
            but weights.

    Raises:
        TypeError: the engine lacks a required attribute.
        ValueError: the coordinator is for another model, or a Megatron engine gets a synchronizer.
        PeerFailedError: rank 0 could not ask where to resume.
    """
    model = CRITIC if has_value_head(engine) else ACTOR
    megatron = is_megatron(getattr(engine, "module", None))
    if not megatron:
        _check_fsdp(engine)
    elif synchronizer is not None:
        raise ValueError(
            "a synchronizer is given with a MegatronEngine; expected None: upload its weights with "
            "megatron_upload_state_dict"
        )
    prefix = component_prefix(model)
    coordinator = coordinator or context.coordinator(component_prefix=prefix)
    if coordinator.component_prefix != prefix:
        raise ValueError(
            f"the coordinator's component_prefix is {coordinator.component_prefix!r}; expected "
            f"{prefix!r} for the {model}'s {type(engine).__name__}"
        )
    for name in ("save_checkpoint", "load_checkpoint"):  # undo an earlier installation
        method = getattr(engine, name, None)
        setattr(engine, name, getattr(method, "verls", method))
    commits = _COMMITS.get(context)
    if commits is None:
        watch = coordinator.watch()
        commits = _COMMITS[context] = StepCommits(coordinator.where, watch, coordinator.rank)
    keep = context.checkpoint.max_to_keep
    manager: Manager
    if megatron:
        manager = MegatronCheckpoints(engine, coordinator, keep, commits)
        save, load = manager.save_checkpoint, manager.load_checkpoint
    else:
        manager = _fsdp_manager(
            engine, coordinator, synchronizer, context.sync.method, keep, commits
        )
        save, load = engine.save_checkpoint, engine.load_checkpoint
    _warn_of_verls_pointer(engine, manager.rank)
    last = last_step or total_steps() or _optimizers_steps(engine)
    through = _ThroughTheRun(context, coordinator, commits, last, reports)
    engine.save_checkpoint = _instead_of(engine.save_checkpoint, through.saving(save))
    engine.load_checkpoint = _instead_of(engine.load_checkpoint, through.loading(load))
    through.resume()
    return manager


class _ThroughTheRun:
    """Adds the run's reports, commits and resume to the manager's saves and loads."""

    def __init__(
        self,
        context: RunContext,
        coordinator: CheckpointCoordinator,
        commits: StepCommits,
        last: int | None,
        reports: bool,
    ) -> None:
        self._context = context
        self._coordinator = coordinator
        self._commits = commits
        self._last = last
        self._reports = reports
        self._trainer = TrainerState(coordinator, commits)

    def resume(self) -> None:
        """On rank 0, ask the monitor where to resume, once for each process."""

        def ask() -> None:
            if self._coordinator.rank == 0:
                self._context.resume_here()

        on_all_ranks(ask, "asking where to resume")

    def saving(self, save: Callable[..., None]) -> Callable[..., None]:
        """``save`` of a model, and of the trainer's own state."""

        def save_checkpoint(
            local_path: str | None,
            hdfs_path: Any = None,
            global_step: int = 0,
            max_ckpt_to_keep: int | None = None,
            **kwargs: Any,
        ) -> None:
            if self._is_trainers(local_path, global_step):
                self._trainer.save(Path(str(local_path)), global_step, hdfs_path)
            else:
                if self._coordinator.rank == 0 and self._commits.registered != global_step:
                    self._context.answer_stop(global_step)
                save(local_path, hdfs_path, global_step, max_ckpt_to_keep, **kwargs)
            if local_path is None or self._commits.registered != global_step:
                return  # another model has not saved yet
            if self._coordinator.rank == 0 and self._reports:
                # The optimizer's step count may be lower than the trainer's.
                last = self._last if global_step <= (self._last or 0) else None
                self._context.report(global_step, last)
            # verl ends its workers after the last save; a step past the last may be that one, too.
            if self._last is not None and global_step >= self._last:
                self._commits.wait(LAST_SAVE_SECONDS)

        return save_checkpoint

    def loading(self, load: Callable[..., None]) -> Callable[..., None]:
        """``load`` of a model; rank 0 then verifies the trainer's own state, which verl reads."""

        def load_checkpoint(local_path: str | None, *args: Any, **kwargs: Any) -> None:
            load(local_path, *args, **kwargs)
            if not local_path or not inside_run(local_path, self._coordinator.where):
                return

            def check() -> None:
                if self._coordinator.rank == 0:
                    verify_trainers(committed_step(local_path, self._coordinator).resume)

            on_all_ranks(check, "checking the trainer's own state")

        return load_checkpoint

    def _is_trainers(self, local_path: str | None, step: int) -> bool:
        if local_path is None or Path(local_path).name != TRAINER:
            return False
        place = place_of(local_path, self._coordinator.where, step)
        return place.held and place.folder == TRAINER


def _instead_of(verls: Any, ours: Callable[..., None]) -> Callable[..., None]:
    wrapped = functools.wraps(verls)(ours)
    wrapped.verls = verls  # type: ignore[attr-defined] # for the next installation
    return wrapped


def has_value_head(engine: Any) -> bool:
    """Whether the engine is a critic's."""
    named = any(kind.__name__.endswith("EngineWithValueHead") for kind in type(engine).__mro__)
    return named or bool(getattr(engine, "is_value_model", False))


def _optimizers_steps(engine: Any) -> int | None:
    total = getattr(getattr(engine, "optimizer_config", None), "total_training_steps", None)
    return int(total) if total and total > 0 else None


def _check_fsdp(engine: Any) -> None:
    for name in _NEEDED:
        if not hasattr(engine, name):
            raise TypeError(
                f"{type(engine).__name__} has no attribute {name!r}; expected an initialised "
                f"FSDPEngine or MegatronEngine of {SUPPORTED}"
            )


def _fsdp_manager(
    engine: Any,
    coordinator: CheckpointCoordinator,
    synchronizer: Any,
    sync_method: SyncMethod,
    max_to_keep: int | None,
    commits: StepCommits,
) -> FSDPCheckpointManager:
    theirs = engine.checkpoint_manager
    manager = FSDPCheckpointManager(
        engine.module,
        engine.optimizer,
        engine.lr_scheduler,
        theirs.processing_class,
        engine.checkpoint_config,
        trust_remote_code=theirs.trust_remote_code,
        coordinator=coordinator,
        synchronizer=synchronizer,
        sync_method=sync_method,
        max_to_keep=max_to_keep,
        merges_lora=adapt(engine).lora is LoRAWeights.MERGED,
        commits=commits,
    )
    engine.checkpoint_manager = manager
    return manager


def _warn_of_verls_pointer(engine: Any, rank: int) -> None:
    config = engine.checkpoint_config
    if rank == 0 and not (config and config.get("async_save", False)):
        logger.warning(
            "a trainer of verl's that does not save through the run writes "
            "latest_checkpointed_iteration.txt itself, before the save is committed: set "
            "checkpoint.async_save=True, which leaves it to the run's monitor"
        )
