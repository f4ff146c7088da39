"""Trainer ranks as Ray actors; in a TrainingRun each has its own pod."""

from datetime import timedelta
from typing import Any

import ray
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from trainsync import Resume, RunContext
from trainsync.api.names import RAY_RESOURCE_TRAINER

from tiny_grpo.config import Config
from tiny_grpo.device import prepare_device
from tiny_grpo.placement import actor_options
from tiny_grpo.trainer import TrainerRank
from tiny_grpo.trainers import CALL_TIMEOUT, COLLECTIVE_TIMEOUT

# A new pod loads torch from its volume before its first answer.
_START_TIMEOUT = 600.0


class _RankActor:
    """The process of one rank."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._store: TCPStore | None = None
        self._trainer: TrainerRank | None = None

    def listen(self) -> tuple[str, int]:
        """Open the group's store on this node, on a free port; rank 0 only."""
        host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self._store = TCPStore(host, 0, self._world_size, is_master=True, wait_for_workers=False)
        return host, self._store.port

    def start(
        self, ctx: RunContext, config: Config, resume: Resume | None, endpoint: tuple[str, int]
    ) -> None:
        """Join the group at ``endpoint`` and build this rank's shard."""
        timeout = timedelta(seconds=COLLECTIVE_TIMEOUT)
        if self._store is None:
            host, port = endpoint
            self._store = TCPStore(host, port, self._world_size, timeout=timeout)
        dist.init_process_group(
            dist.get_default_backend_for_device(prepare_device()),
            store=self._store,
            rank=self._rank,
            world_size=self._world_size,
            timeout=timeout,
        )
        self._trainer = TrainerRank(ctx, config, resume)

    def call(self, method: str, *arguments: object) -> Any:
        """Call a method of this rank's trainer."""
        return getattr(self._trainer, method)(*arguments)


class RayTrainers:
    """The trainer group, one Ray actor for each rank."""

    def __init__(self, ctx: RunContext, config: Config, resume: Resume | None) -> None:
        """Start all ranks; returns when every rank has built or loaded its shard."""
        actor: Any = ray.remote(_RankActor).options(
            **actor_options(ctx, config, RAY_RESOURCE_TRAINER)
        )
        world_size = config.trainers
        self._actors = [actor.remote(rank, world_size) for rank in range(world_size)]
        endpoint = ray.get(self._actors[0].listen.remote(), timeout=_START_TIMEOUT)
        ray.get(
            [rank.start.remote(ctx, config, resume, endpoint) for rank in self._actors],
            timeout=_START_TIMEOUT,
        )

    def call(self, method: str, *arguments: object) -> list[Any]:
        """See `Trainers`."""
        answers: list[Any] = ray.get(
            [rank.call.remote(method, *arguments) for rank in self._actors], timeout=CALL_TIMEOUT
        )
        return answers
