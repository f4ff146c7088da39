"""A tiny FSDP2 training in which all resumable state affects the loss."""

import asyncio
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.tensor
import xxhash
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from trainsync import Loaded, RunContext, all_ranks, load_sharded, training_state

COMPONENTS = ("model", "optim", "extra_state")
INTERVAL = 2


class Shuffled:
    """A dataloader with state: this rank's share of the data, in this rank's order."""

    def __init__(self, rank: int, world_size: int, batch: int = 4) -> None:
        data = torch.randn(60, 5, generator=torch.Generator().manual_seed(1))
        self._data = data[rank::world_size]
        self._batch = batch
        self._generator = torch.Generator().manual_seed(50 + rank)
        self._order = torch.empty(0, dtype=torch.long)

    def take(self) -> torch.Tensor:
        if len(self._order) < self._batch:
            self._order = torch.randperm(len(self._data), generator=self._generator)
        batch, self._order = self._order.split([self._batch, len(self._order) - self._batch])
        return self._data[batch]

    def state_dict(self) -> dict[str, Any]:
        return {"order": self._order.clone(), "generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._order = state["order"]
        self._generator.set_state(state["generator"])


def build_model() -> torch.nn.Module:
    """Equal in every call, independent of the generators.

    7 rows over 2 or 3 ranks make uneven shards; with 1 row all ranks but one have an empty shard.
    """
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(5, 7),
        torch.nn.Tanh(),
        torch.nn.Dropout(0.4),
        torch.nn.Linear(7, 1),
    )


class Job:
    """One rank; resumes from the commit in ``directory``, on any number of ranks."""

    def __init__(self, directory: Path | str, *, combine: Any = None) -> None:
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.context = RunContext.from_env(directory)
        self.coordinator = self.context.coordinator()
        self.model = build_model()
        for layer in (self.model[0], self.model[3]):  # type: ignore[index]
            fully_shard(layer)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, T_max=12)
        self.data = Shuffled(self.rank, self.world_size)
        self.seen = 0
        # State of this rank alone, which only the checkpoint can restore.
        seed = 1000 * self.context.attempt + self.rank
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        self.loaded: Loaded | None = None
        self.first_step = 1
        resume = self.context.resume()
        if resume is not None:
            self.loaded = load_sharded(
                resume,
                model=self.model,
                optimizer=self.optimizer,
                scheduler=self.schedule,
                dataloader=self.data,
                combine_dataloaders=combine,
                timeout=30,
            )
            self.seen = self.loaded.extra["seen"]
            self.first_step = resume.step + 1

    def train(self) -> float:
        batch = self.data.take()
        batch = batch * (1 + 0.1 * random.random()) + 0.1 * float(np.random.standard_normal())
        loss = self.model(batch).square().mean() + 0.01 * self.seen
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        self.seen += 1
        return float(loss.detach())

    def save(self, step: int) -> None:
        self.coordinator.save_async("model", self.model.state_dict(), step)
        self.coordinator.save_async("optim", self.optimizer.state_dict(), step)
        state = training_state(
            scheduler=self.schedule, dataloader=self.data, extra={"seen": self.seen}
        )
        self.coordinator.save_async("extra_state", state, step)
        if self.rank == 0:
            everyone = all_ranks(*COMPONENTS, world_size=self.world_size)
            self.coordinator.register(step, checkpoint_participants=everyone)

    def run(self, last: int) -> dict[int, float]:
        """Train to step ``last``; returns the losses by step after the last commit."""
        losses = {}
        for step in range(self.first_step, last + 1):
            losses[step] = self.train()
            if step % INTERVAL == 0:
                self.save(step)
        self.coordinator.wait_all(60)
        if self.rank == 0 and losses:
            asyncio.run(self.coordinator.register_and_monitor(max(losses), timeout=60))
        dist.barrier()
        return losses

    def close(self) -> None:
        dist.barrier()
        self.context.close()

    def whole(self) -> dict[str, str]:
        """Digests of every full tensor of model and optimizer; a collective."""
        return whole_state(self.model, self.optimizer)


def whole_state(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Digests of full tensors, to compare states of different numbers of ranks."""
    tensors = dict(model.state_dict())
    for number, state in optimizer.state_dict()["state"].items():
        tensors.update({f"{number}.{key}": value for key, value in state.items()})
    return {name: digest(tensor) for name, tensor in tensors.items()}


def digest(tensor: torch.Tensor) -> str:
    """Digest of a full tensor's bytes and shape."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    raw = whole.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return f"{tuple(whole.shape)} {xxhash.xxh3_128_hexdigest(raw.data)}"
