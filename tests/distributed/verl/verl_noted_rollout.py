"""An inference engine behind verl's rollout worker that only records the weights' digest.

verl imports this as a plug-in (``VERL_USE_EXTERNAL_MODULES``), which registers the rollout "noted".
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import torch
from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout
from verl_grpo.tiny_qwen2 import digest

_ROLLOUT_REGISTRY["noted", "async"] = f"{__name__}.NotedRollout"


class NotedRollout(BaseRollout):  # type: ignore[misc]
    """Replaces vLLM behind verl's worker: takes each version and records its digest."""

    def __init__(self, *args: Any, replica_rank: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.replica_rank = replica_rank
        self.is_leader_rank = True
        self.got: dict[int, str] = {}
        self.doomed = False

    async def resume(self, tags: list[str]) -> None:
        """Does nothing: no memory was released."""

    async def release(self) -> None:
        """Does nothing: there is no GPU memory."""

    async def update_weights(
        self,
        weights: AsyncIterator[tuple[str, torch.Tensor]],
        wire_format: str = "named_tensors",
        **kwargs: Any,
    ) -> None:
        """Take all weights; a worker marked for death is killed during the transfer."""
        if self.doomed:
            os.kill(os.getpid(), signal.SIGKILL)
            await asyncio.sleep(60)  # until the kernel has killed the process
        taken = {name: tensor.clone() async for name, tensor in weights}
        self.got[kwargs["global_steps"]] = digest(taken)
