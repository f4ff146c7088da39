"""An inference engine behind verl's rollout worker that only notes what it is given.

verl imports this as a plug-in (``VERL_USE_EXTERNAL_MODULES``), and then knows the rollout "noted".
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
    """In the place of vLLM behind verl's worker: takes each version, and notes its digest."""

    def __init__(self, *args: Any, replica_rank: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.replica_rank = replica_rank
        self.is_leader_rank = True
        self.got: dict[int, str] = {}
        self.doomed = False

    async def resume(self, tags: list[str]) -> None:
        """Nothing was released."""

    async def release(self) -> None:
        """There is no memory of a GPU to give back."""

    async def update_weights(
        self,
        weights: AsyncIterator[tuple[str, torch.Tensor]],
        wire_format: str = "named_tensors",
        **kwargs: Any,
    ) -> None:
        """Take them all; one that is doomed is killed when the weights are on their way."""
        if self.doomed:
            os.kill(os.getpid(), signal.SIGKILL)
            await asyncio.sleep(60)  # until the kernel has done it
        taken = {name: tensor.clone() async for name, tensor in weights}
        self.got[kwargs["global_steps"]] = digest(taken)
