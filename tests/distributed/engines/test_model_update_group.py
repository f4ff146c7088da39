"""`fsdp_sync_weight_nccl` by public names alone: in a run, and in a process group of one's own."""

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
import torch.distributed as dist
import trainsync
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from trainsync.api import env

from tests.distributed.processes.forked import preload
from tests.distributed.ranks import run_ranks, values_of

preload("ray")

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(240)]

logger = logging.getLogger("test")
SIZES = ((3, 8), (8, 2))


def made(value: float, mesh: DeviceMesh | None = None) -> torch.nn.Module:
    model = torch.nn.Sequential(*(torch.nn.Linear(*size) for size in SIZES))
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.copy_(value + number + torch.arange(parameter.numel()).view_as(parameter))
    fully_shard(model, mesh=mesh)
    return model


def in_a_run(directory: Path, ray_arguments: dict[str, Any]) -> list[bool]:
    """Whether the explorer, on rank 0, took each version unchanged."""
    os.environ |= {env.SYNC_METHOD: "nccl", env.SYNC_TIMEOUT_SECONDS: "60"}
    dist.init_process_group("gloo")
    ray.init(**ray_arguments)
    taken = []
    with trainsync.RunContext.from_env(directory) as ctx:
        leads = dist.get_rank() == 0
        explorer = None
        if leads:
            ctx.synchronizer()
            explorer = ctx.explorer("e")
        dist.barrier()
        group = trainsync.ModelUpdateGroup.create(ctx)
        for version, step in ((1, 1), (2, None)):  # None: the version after the last
            engine = trainsync.TrainedModule(made(version))
            report = trainsync.fsdp_sync_weight_nccl(engine, group, step)
            assert (report is not None) == leads
            expected = dict(engine.get_per_tensor_param())
            if explorer is not None:
                assert report is not None
                assert (report.version, report.served) == (version, ("e",))
                weights = explorer.wait_and_fetch(version - 1)
                assert weights is not None
                same = all(torch.equal(weights.state_dict[n], t) for n, t in expected.items())
                taken.append(same and weights.version == version)
                explorer.acknowledge(weights)
            dist.barrier()
        group.close()
        if explorer is not None:
            explorer.leave()
    return taken


def test_the_group_of_a_run_sends_versions_that_its_explorers_take(
    tmp_path: Path, ray_of_ranks: dict[str, Any]
) -> None:
    ranks = run_ranks(in_a_run, tmp_path, ray_of_ranks, seconds=200)
    assert values_of(ranks) == [[True, True], []]


def in_a_process_group() -> list[list[float]]:
    """Ranks 0 and 1 train; rank 2 is an explorer that receives in the reference's way."""
    dist.init_process_group("gloo")
    group = dist.new_group([0, 2])
    if dist.get_rank() < 2:
        mesh = DeviceMesh("cpu", [0, 1])
        engine = trainsync.TrainedModule(made(5, mesh))
        for sync in (trainsync.fsdp_sync_weight_nccl, trainsync.megatron_sync_weight_nccl):
            assert sync(engine, group) is None
        with pytest.raises(TypeError, match="a process group knows no versions"):
            trainsync.fsdp_sync_weight_nccl(engine, group, 3)
        return []
    received = []
    for _ in range(2):
        for columns, rows in SIZES:
            for shape in ((rows, columns), (rows,)):
                tensor = torch.empty(shape)
                assert isinstance(group, dist.ProcessGroup)
                dist.broadcast(tensor, 0, group=group)
                received.append(tensor.flatten().tolist())
    return received


def test_a_process_group_gets_every_weight_in_the_order_of_the_engine() -> None:
    _, _, received = values_of(run_ranks(in_a_process_group, world_size=3))
    model = torch.nn.Sequential(*(torch.nn.Linear(*size) for size in SIZES))
    expected = [
        [5.0 + number + at for at in range(parameter.numel())]
        for number, parameter in enumerate(model.parameters())
    ]
    assert received == expected * 2


def test_what_is_no_group_is_refused_with_the_call_that_makes_one() -> None:
    engine = trainsync.TrainedModule(torch.nn.Linear(1, 1))
    for group in (None, object()):
        with pytest.raises(TypeError, match=r"expected ModelUpdateGroup\.create\(ctx\), or a pro"):
            trainsync.fsdp_sync_weight_nccl(engine, group)


def test_a_run_with_another_method_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(env.SYNC_METHOD, "memory")
    with (
        trainsync.RunContext.from_env(tmp_path) as ctx,
        pytest.raises(ValueError, match="is memory, by which its explorers"),
    ):
        trainsync.ModelUpdateGroup.create(ctx)
