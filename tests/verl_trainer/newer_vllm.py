"""What verl 0.9.1 calls of vLLM, and vLLM 0.32 no longer has: verl names 0.24 among its extras.

verl imports this by ``actor_rollout_ref.model.external_lib``, also where it starts vLLM's server.
"""

import sys
from typing import Any

_MODULE = "vllm.v1.engine.async_llm"

if _MODULE in sys.modules:
    AsyncLLM = sys.modules[_MODULE].AsyncLLM
    _pause_generation = AsyncLLM.pause_generation

    async def pause_generation(
        self: Any, *, wait_for_inflight_requests: bool = False, **kwargs: Any
    ) -> None:
        """``mode`` took the place of verl's argument."""
        mode = "wait" if wait_for_inflight_requests else "abort"
        await _pause_generation(self, **{"mode": mode, **kwargs})

    AsyncLLM.pause_generation = pause_generation
