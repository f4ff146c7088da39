"""All explorers, as the driver sees them."""

from collections.abc import Sequence
from typing import Any

import ray
from trainsync import RunContext
from trainsync.api.names import RAY_RESOURCE_EXPLORER

from tiny_grpo.config import Config
from tiny_grpo.explorer import Explorer, Probe
from tiny_grpo.placement import actor_options
from tiny_grpo.rollout import Rollouts

# A fresh pod reads the whole of torch from its volume before its first answer.
_START_TIMEOUT = 600.0


class ExplorerGroup:
    """One Ray actor for each explorer. An error in any of them, or its death, is raised here."""

    def __init__(self, ctx: RunContext, config: Config) -> None:
        """Ask for the actors, and return at once; `wait_ready` waits for them."""
        actor: Any = ray.remote(Explorer).options(
            **actor_options(ctx, config, RAY_RESOURCE_EXPLORER)
        )
        self._actors = [actor.remote(ctx, config, index) for index in range(config.explorers)]
        self._timeout = ctx.sync.timeout

    def wait_ready(self) -> None:
        """Wait until every explorer has joined the run."""
        ray.get([actor.__ray_ready__.remote() for actor in self._actors], timeout=_START_TIMEOUT)

    def sync(self, version: int) -> None:
        """Let every explorer take, and acknowledge, ``version``."""
        self._all("sync", [(version,)] * len(self._actors))

    def rollout(self, step: int, prompts: Sequence[str]) -> Rollouts:
        """Answers to all ``prompts``, in their order; the explorers share them evenly."""
        share = len(prompts) // len(self._actors)
        shares = [
            (step, list(prompts[index * share : (index + 1) * share]))
            for index in range(len(self._actors))
        ]
        parts: list[Rollouts] = self._all("rollout", shares)
        return Rollouts.join(parts)

    def probe(self) -> list[Probe]:
        """The probe batch under every explorer's weights."""
        return self._all("probe", [()] * len(self._actors))

    def _all(self, method: str, arguments: Sequence[tuple[object, ...]]) -> list[Any]:
        references = [
            getattr(actor, method).remote(*args)
            for actor, args in zip(self._actors, arguments, strict=True)
        ]
        answers: list[Any] = ray.get(references, timeout=self._timeout)
        return answers
