"""One rank of the trainer group, as a Ray actor in its own pod."""

import logging
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined] # not in its __all__
from trainsync import Resume, RunContext, WeightPublisher

from verl_grpo.tiny_qwen2 import Rollouts, digest

SECONDS = 300.0
"""Limit of every call of a rank; importing verl in a new pod is slow."""

logger = logging.getLogger(__name__)


class TrainerRank:
    """verl's engine, with checkpoints and weights handled by the run."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        self._store: TCPStore | None = None

    def listen(self) -> tuple[str, int]:
        """Open the group's store on this node, on a free port; rank 0 only."""
        # Ray does not annotate this function.
        host: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        self._store = TCPStore(host, 0, self._world_size, is_master=True, wait_for_workers=False)
        return host, self._store.port

    def start(
        self, ctx: RunContext, resume: Resume | None, steps: int, endpoint: tuple[str, int]
    ) -> None:
        """Join the group at ``endpoint``, make the engine, and load the checkpoint if there is
        one."""
        timeout = timedelta(seconds=SECONDS)
        store = self._store or TCPStore(*endpoint, self._world_size, timeout=timeout)
        dist.init_process_group(
            "gloo", store=store, rank=self._rank, world_size=self._world_size, timeout=timeout
        )
        # Imported late, since the driver imports this module too. The first import sets the
        # platform.
        from verl_grpo import cpu_engine  # isort: skip
        from trainsync import install_checkpoint_manager
        from verl.utils import fs

        self._ctx = ctx
        self._train = cpu_engine.train
        # Like verl's trainer after each save: with verl's own function, under this user and umask.
        # The monitor, another user, moves the step's files there.
        self._make_folder: Any = fs.local_mkdir_safe
        with tempfile.TemporaryDirectory() as directory:
            self._engine: Any = cpu_engine.make_engine(Path(directory), steps)
        # The driver reports steps, since it has the rewards.
        self._manager = install_checkpoint_manager(self._engine, ctx, reports=False)
        if resume is not None:
            self._engine.load_checkpoint(self._path(resume.step))
        self._publisher = WeightPublisher(ctx, self._engine, self._manager.coordinator)

    def train(self, rollouts: Rollouts) -> float:
        """Take one step; returns the loss."""
        return self._train(self._engine, rollouts)

    def publish(self, step: int) -> str | None:
        """Publish the weights as version ``step``; returns their digest on rank 0."""
        report = self._publisher.publish(step)
        for name, cause in (*report.lost.items(), *report.refused.items()):
            logger.warning("version %d did not reach %s: %s", step, name, cause)
        weights, _ = self._engine.get_per_tensor_param()
        whole = dict(weights)  # a collective
        return digest(whole) if self._rank == 0 else None

    def save(self, step: int) -> None:
        """Save this rank's part of the checkpoint of ``step``, in the background."""
        self._engine.save_checkpoint(self._path(step), global_step=step)
        if self._rank == 0:
            self._make_folder(str(Path(self._path(step)).parent))

    def finish(self) -> None:
        """Wait until all saves are committed."""
        self._manager.wait_on_save_thread(SECONDS)
        self._publisher.close()

    def _path(self, step: int) -> str:
        return str(self._ctx.directory / f"global_step_{step}" / "actor")


class Trainers:
    """The driver's handle of all ranks."""

    def __init__(
        self,
        ctx: RunContext,
        resume: Resume | None,
        steps: int,
        world_size: int,
        options: dict[str, Any],
    ) -> None:
        """Start all ranks; returns when every rank has its engine."""
        actor: Any = ray.remote(TrainerRank).options(**options)
        self._actors = [actor.remote(rank, world_size) for rank in range(world_size)]
        endpoint = ray.get(self._actors[0].listen.remote(), timeout=SECONDS)
        self.call("start", ctx, resume, steps, endpoint)

    def check(self) -> None:
        """See that all ranks live, while none of them is called; raises Ray's error of one that
        died. A rank that does not answer at once is looked at again at the next call."""
        ready = [actor.__ray_ready__.remote() for actor in self._actors]
        answered, _ = ray.wait(ready, num_returns=len(ready), timeout=1.0)
        ray.get(answered)

    def call(self, method: str, *arguments: object) -> list[Any]:
        """Call a method on all ranks at once; returns the results by rank."""
        answers: list[Any] = ray.get(
            [getattr(actor, method).remote(*arguments) for actor in self._actors], timeout=SECONDS
        )
        return answers
