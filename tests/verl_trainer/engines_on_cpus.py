"""verl's FSDP engine for the device "cpu": verl registers it for those that it knows.

verl imports this by ``actor_rollout_ref.model.external_lib``, before it makes an engine.
"""

from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], device="cpu")(
    FSDPEngineWithLMHead
)
