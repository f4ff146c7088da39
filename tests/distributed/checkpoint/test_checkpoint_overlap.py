"""Overlapped saves of sharded models: DTensors whose local shards are the live parameters."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from trainsync.api.protocol import SaveKind
from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.checkpoint.save.staging import staging
from trainsync.checkpoint.save.staging.copy import copy_all
from trainsync.monitor.client.disk import DiskMonitorClient
from trainsync.storage.layout import RunDirectory

from tests.distributed.ranks import run_ranks, values_of

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(180)]

INCARNATION = "0123456789abcdef"


@pytest.mark.parametrize("variant", ["resharded", "kept whole after forward", "offloaded"])
def test_the_shards_are_those_from_before_the_step_that_waited(
    tmp_path: Path, variant: str
) -> None:
    for rank in values_of(run_ranks(save_and_train, tmp_path, variant)):
        assert rank["waited"] > 0.05
        assert rank["equal"], "the file is not what was there at the save"
        assert rank["changed"], "the step changed nothing: the test shows nothing"


def save_and_train(directory: Path, variant: str) -> dict[str, Any]:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(5, 7), torch.nn.BatchNorm1d(7), torch.nn.Tanh(), torch.nn.Linear(7, 1)
    )
    policy = CPUOffloadPolicy(pin_memory=False) if variant == "offloaded" else OffloadPolicy()
    for module in (model[0], model[3], model):
        fully_shard(
            module,
            reshard_after_forward=variant != "kept whole after forward",
            offload_policy=policy,
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def backward() -> None:
        model(torch.randn(8, 5)).square().mean().backward()

    backward()
    optimizer.step()
    optimizer.zero_grad()

    client = DiskMonitorClient(directory, attempt=0, incarnation=INCARNATION)
    coordinator = CheckpointCoordinator(client, directory, rank=rank, world_size=2, overlapped=True)
    coordinator.guard(optimizer)
    go = hold_copies_up()
    states = {"model": model.state_dict(), "optim": optimizer.state_dict()}
    before = {name: content(state) for name, state in states.items()}
    for name, state in states.items():
        coordinator.save_async(name, state, 1)
    backward()
    threading.Timer(0.2, go.set).start()
    optimizer.step()
    optimizer.zero_grad()
    backward()
    optimizer.step()
    coordinator.wait_all(60)
    save = RunDirectory(directory).save(0, INCARNATION, SaveKind.CHECKPOINT, 1)
    loaded = {}
    for name in states:
        (path,) = save.files.glob(f"by-*/actor/{name}_world_size_2_rank_{rank}.pt")
        loaded[name] = torch.load(path, weights_only=True)
    dist.barrier()
    return {
        "waited": coordinator.stats.step_wait_seconds,
        "equal": all(content(loaded[name]) == before[name] for name in states),
        "changed": content(model.state_dict()) != before["model"],
    }


def hold_copies_up() -> threading.Event:
    """Copies in other threads than this one wait for the event."""
    go, own = threading.Event(), threading.current_thread()

    def copy(*args: Any) -> None:
        assert threading.current_thread() is own or go.wait(60)
        copy_all(*args)

    staging.copy_all = copy
    return go


def content(value: Any) -> Any:
    """Nested as it is, tensors as the bytes of their local part."""
    if isinstance(value, dict):
        return {key: content(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [content(inner) for inner in value]
    if isinstance(value, torch.Tensor):
        local = value.to_local() if isinstance(value, DTensor) else value
        flat = local.detach().contiguous().reshape(-1)
        return bytes(flat.view(torch.uint8).numpy()), local.dtype, tuple(local.shape)
    return value
