"""Importing this module makes verl's models and trainer save and load through the run.

    actor_rollout_ref.model.external_lib=trainsync.integrations.verl.checkpoints
    critic.model.external_lib=trainsync.integrations.verl.checkpoints

verl imports ``external_lib`` in every worker before it makes the engine, and in its trainer's
process. verl has no setting for the checkpoint manager, so ours is installed at the end of
``initialize`` of its FSDP and Megatron engines. Engines with an ``initialize`` of their own
(VeOmni, …) are refused, unless they only infer.
"""

import functools
from collections.abc import Callable
from typing import Any, Final

from verl.workers import engine as verl_engines
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

from trainsync.engines.checkpoints.arguments import ACTOR, CRITIC, component_prefix, place_of
from trainsync.engines.verl.install import has_value_head, install_checkpoint_manager
from trainsync.integrations.verl import trainer
from trainsync.integrations.verl.saving import SaveSettings, exit_in_order_on_sigterm
from trainsync.runtime.context import RunContext

# None where Megatron is not installed.
_MEGATRON: Final = getattr(verl_engines, "MegatronEngine", None)
_SUPPORTED: Final = (FSDPEngine,) if _MEGATRON is None else (FSDPEngine, _MEGATRON)


@functools.cache
def _context() -> RunContext:
    """The process's RunContext, shared by all its models, which are committed together."""
    return RunContext.from_env()


def _attach_at_the_end_of(kind: Any) -> None:
    """Wrap ``initialize`` of this engine class, to install our checkpoint manager at its end."""
    initialize: Callable[[Any], None] = kind.initialize

    @functools.wraps(initialize)
    def initialize_and_attach(self: Any) -> None:
        initialize(self)
        if not self.engine_config.forward_only:  # a reference model saves nothing
            context = _context()
            model = CRITIC if has_value_head(self) else ACTOR
            settings = SaveSettings.from_env()
            if settings.graceful_shutdown:
                exit_in_order_on_sigterm()
            coordinator = settings.coordinator(context, component_prefix(model))
            install_checkpoint_manager(self, context, coordinator=coordinator)
            if isinstance(coordinator.where, str):
                self.save_checkpoint = _of_trainers_that_resume(self, coordinator.where)

    kind.initialize = initialize_and_attach


def _of_trainers_that_resume(engine: Any, url: str) -> Callable[..., None]:
    """``engine.save_checkpoint``, of a run in a store, for trainers alone that save through the
    run: another one finds nothing there to resume from, and would begin anew after a restart."""
    save: Callable[..., None] = engine.save_checkpoint

    @functools.wraps(save)
    def save_checkpoint(
        local_path: Any, hdfs_path: Any = None, global_step: int = 0, *more: Any, **named: Any
    ) -> None:
        if local_path is not None and not place_of(local_path, url, global_step).held:
            raise ValueError(
                f"a trainer of verl's that does not save through the run saves into {local_path}; "
                "expected PPOTrainer or RayPPOTrainer, or a run on a volume: verl's fully "
                "asynchronous recipe and its SFT trainers cannot resume from a bucket"
            )
        save(local_path, hdfs_path, global_step, *more, **named)

    return save_checkpoint


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
    trainer.install()


_install()
