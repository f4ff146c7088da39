"""What a user has, as `TrainingEngine`."""

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
        TypeError: it is none of those; names the attribute that is missing, and the versions of
            verl that are supported.
    """
    if hasattr(type(engine), "resident"):  # no engine of verl has that
        return cast(TrainingEngine, engine)
    module = getattr(engine, "module", None)
    if is_megatron(module):
        return VerlMegatronEngine(engine)
    if hasattr(engine, "get_per_tensor_param"):
        return VerlFSDPEngine(engine)
    return TrainedModule(module_of(engine))
