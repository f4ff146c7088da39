"""Turns the user's engine, module or models into a `TrainingEngine`."""

from typing import Any, cast

from trainsync.engines.module_engine import TrainedModule
from trainsync.engines.protocol import TrainingEngine, is_megatron, module_of
from trainsync.engines.verl.adapters import VerlFSDPEngine, VerlMegatronEngine


def adapt(engine: Any) -> TrainingEngine:
    """``engine`` as a `TrainingEngine`.

    Args:
        engine: verl's FSDPEngine or MegatronEngine after ``initialize()``; a `TrainedModule` or
            `TrainedMegatron`; anything with a sharded module as ``module``; or one's own
            implementation of `TrainingEngine`.

    Raises:
        TypeError: ``engine`` is none of those; names the missing attribute and the supported
            versions of verl.
    """
    if hasattr(type(engine), "resident"):  # no verl engine has ``resident``
        return cast(TrainingEngine, engine)
    module = getattr(engine, "module", None)
    if is_megatron(module):
        return VerlMegatronEngine(engine)
    if hasattr(engine, "get_per_tensor_param"):
        return VerlFSDPEngine(engine)
    return TrainedModule(module_of(engine))
