"""verl's actors save and load through the run; importing this switches it on, in this process.

    actor_rollout_ref.model.external_lib=trainsync.integrations.verl.checkpoints

verl imports ``external_lib`` in every worker before it makes the engine. It has no setting for the
checkpoint manager, so the end of the ``initialize`` of its FSDP and Megatron engines is where ours
is put in. Engines that have an ``initialize`` of their own (VeOmni, …) are refused, unless they
only infer.
"""

import functools
import logging
import os
from collections.abc import Callable
from typing import Any, Final

import torch.distributed as dist
from verl.workers import engine as verl_engines
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine, FSDPEngineWithValueHead

from trainsync.engines.verl.install import install_checkpoint_manager, install_megatron_checkpoints
from trainsync.runtime.context import RunContext

logger = logging.getLogger(__name__)

# None where Megatron is not installed.
_MEGATRON: Final = getattr(verl_engines, "MegatronEngine", None)
_SUPPORTED: Final = (FSDPEngine,) if _MEGATRON is None else (FSDPEngine, _MEGATRON)

TOTAL_STEPS: Final = "TRAINSYNC_VERL_TOTAL_STEPS"
"""Environment variable: the run's last step, where the optimizer's number of steps is another."""


def attach(engine: Any, context: RunContext) -> None:
    """Let an initialised actor's engine save and load through the run, and report its steps.

    The save of the last step returns when this rank's part is written and, on rank 0, when all is
    committed: verl waits for all ranks, then ends the workers. The monitor moves the pointer a
    moment later, or when the next attempt asks where to resume.

    Raises:
        ValueError: the engine is a critic's, or `TOTAL_STEPS` is not a number.
        TypeError: see `install_checkpoint_manager` and `install_megatron_checkpoints`.
    """
    if isinstance(engine, FSDPEngineWithValueHead) or getattr(engine, "is_value_model", False):
        raise ValueError(
            "trainsync.integrations.verl.checkpoints is the external_lib of a critic; expected it "
            "at actor_rollout_ref.model alone, with an estimator that needs no critic, such as "
            "algorithm.adv_estimator=grpo: a run commits one model so far"
        )
    megatron = _MEGATRON is not None and isinstance(engine, _MEGATRON)
    install = install_megatron_checkpoints if megatron else install_checkpoint_manager
    manager = install(engine, context)
    save: Callable[..., None] = engine.save_checkpoint
    total = _total_steps(engine)

    @functools.wraps(save)
    def save_checkpoint(
        local_path: str | None,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
        **kwargs: Any,
    ) -> None:
        save(local_path, hdfs_path, global_step, max_ckpt_to_keep, **kwargs)
        if manager.rank == 0:
            context.report(global_step, total)
        if total is not None and global_step >= total:
            manager.wait_on_save_thread()

    engine.save_checkpoint = save_checkpoint


@functools.cache
def _context() -> RunContext:
    """This process's; rank 0 claims the attempt if the driver has not."""
    context = RunContext.from_env()
    if dist.get_rank() == 0:
        # The monitor repairs the pointer that verl's trainer reads next, and holds that step.
        context.resume()
    return context


def _total_steps(engine: Any) -> int | None:
    given = os.environ.get(TOTAL_STEPS)
    if given is not None:
        if not given.isdecimal() or int(given) < 1:
            raise ValueError(f"{TOTAL_STEPS} is {given!r}; expected the number of the last step")
        return int(given)
    total = getattr(engine.optimizer_config, "total_training_steps", None)
    return int(total) if total and total > 0 else None


def _attach_at_the_end_of(kind: Any) -> None:
    """Of ``initialize``, for engines of that class."""
    initialize: Callable[[Any], None] = kind.initialize

    @functools.wraps(initialize)
    def initialize_and_attach(self: Any) -> None:
        initialize(self)
        if not self.engine_config.forward_only:  # a reference model saves nothing
            attach(self, _context())

    kind.initialize = initialize_and_attach


def _install() -> None:
    new: Callable[..., Any] = EngineRegistry.new
    for kind in _SUPPORTED:
        _attach_at_the_end_of(kind)

    @functools.wraps(new)
    def new_of_supported(*args: Any, **kwargs: Any) -> Any:
        engine = new(*args, **kwargs)
        attached = any(type(engine).initialize is kind.initialize for kind in _SUPPORTED)
        if not attached and not engine.engine_config.forward_only:
            raise ValueError(
                "trainsync.integrations.verl.checkpoints is the external_lib of "
                f"{type(engine).__name__}; expected verl's FSDPEngine or MegatronEngine "
                "(actor.strategy=fsdp2, fsdp or megatron): no other engine saves through the run"
            )
        return engine

    EngineRegistry.new = staticmethod(new_of_supported)  # type: ignore[method-assign]


_install()
