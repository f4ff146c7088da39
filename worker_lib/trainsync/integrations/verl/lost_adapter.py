"""Refuses ``lora.merge`` of verl 0.8, whose FSDP engine then sends the base model's weights.

That engine merges the adapter and unmerges it before it gathers a weight. A backend gets only names
and tensors and cannot detect this, so the engine's method is patched to raise.
"""

import functools
import sys
from typing import Any, Final

from trainsync.engines.protocol import LoRAWeights
from trainsync.engines.verl.adapters import VerlFSDPEngine

_ENGINES: Final = "verl.workers.engine.fsdp.transformer_impl"


def refuse_lost_adapter() -> None:
    """Let ``get_per_tensor_param`` of verl's FSDP engine raise `ValueError` where it would return
    weights without the adapter that the configuration merges.

    verl makes a worker's engine before its backend, so a process that has not loaded the engine's
    module has no engine. verl 0.9 and later need no patch.
    """
    module = sys.modules.get(_ENGINES)
    kind = getattr(module, "FSDPEngine", None)
    if kind is not None and not hasattr(kind, "_merged_lora_per_tensor_param"):
        _guard(kind)


@functools.cache  # once for each class
def _guard(kind: Any) -> None:
    give = kind.get_per_tensor_param

    @functools.wraps(give)
    def get_per_tensor_param(self: Any, *args: Any, **kwargs: Any) -> Any:
        engine = VerlFSDPEngine(self)
        if engine.lora is LoRAWeights.MERGED and engine.adds_adapter:
            raise ValueError(
                "verl 0.8 with FSDP sends rollouts the base model's weights when "
                "actor_rollout_ref.model.lora.merge=True, without the adapter that is trained; "
                "expected verl 0.9, or a model without LoRA"
            )
        return give(self, *args, **kwargs)

    kind.get_per_tensor_param = get_per_tensor_param
