"""`WeightPublisher`: which state dicts two attempts write, and what travels with delta."""

import asyncio
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from trainsync import RunContext, WeightPublisher, all_ranks
from trainsync.api import env
from trainsync.api.protocol import SaveKind
from trainsync.engines.adapt import adapt
from trainsync.engines.module_engine import TrainedModule
from trainsync.engines.publish import publisher as publishing
from trainsync.runtime import methods
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves.manifest import committed_steps, read_manifest
from trainsync.weights.transports.broadcast.broadcaster import BroadcastReport
from trainsync.weights.transports.broadcast.receiver import WeightReceiver
from trainsync.weights.transports.object_store import upload

from tests.distributed.engines.fsdp_models import Content, content, engine
from tests.distributed.processes.forked import preload
from tests.distributed.ranks import run_ranks, values_of

preload("ray")

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(180)]


def publish(directory: Path, first: int, last: int) -> list[bool]:
    """One attempt: whether each version's state dict was staged. A checkpoint follows the last."""
    os.environ[env.SYNC_METHOD] = "checkpoint"
    dist.init_process_group("gloo")
    with RunContext.from_env(directory) as context:
        coordinator = context.coordinator()
        staged = []
        made = engine("fsdp2")
        with WeightPublisher(context, made, coordinator) as publisher:
            for step in range(first, last + 1):
                report = publisher.publish(step)
                assert (report.version, dict(report.lost), dict(report.refused)) == (step, {}, {})
                staged.append(report.bytes > 0)
            coordinator.save_async("extra_state", {"step": last}, last)
            coordinator.wait_all(60)
        if coordinator.rank == 0:
            for step in range(first, last + 1):
                asyncio.run(coordinator.register_and_monitor(step, is_state_dict=True, timeout=60))
            asyncio.run(
                coordinator.register_and_monitor(
                    last,
                    checkpoint_participants=all_ranks("extra_state", world_size=2),
                    timeout=60,
                )
            )
        dist.barrier()
    return staged


def test_an_attempt_that_goes_on_keeps_the_state_dict_of_its_first_step(tmp_path: Path) -> None:
    assert values_of(run_ranks(publish, tmp_path, 2, 3)) == [[True, True]] * 2
    assert values_of(run_ranks(publish, tmp_path, 3, 4)) == [[False, True]] * 2
    run = RunDirectory(tmp_path)
    assert committed_steps(run, SaveKind.STATE_DICT) == [2, 3, 4]
    attempts = [read_manifest(run, SaveKind.STATE_DICT, step).manifest.attempt for step in (3, 4)]
    assert attempts == [0, 1]


# Half the bytes, from a group that is not the default one.

OWN = (1, 2)  # the trainer's ranks among three


class Wide(torch.nn.Module):
    """float32 masters: a weight that travels in parts, a small one, and integers."""

    def __init__(self) -> None:
        super().__init__()
        self.large = torch.nn.Parameter(torch.arange(1500 * 2048.0).reshape(1500, 2048) / 7)
        self.small = torch.nn.Parameter(torch.arange(5.0) / 3)
        self.register_buffer("count", torch.arange(4))


def publish_narrow(directory: Path, ray_arguments: dict[str, Any], method: str) -> dict[str, Any]:
    """A version from two ranks of three, and what became of it; nothing on the others."""
    os.environ |= {env.SYNC_METHOD: method, env.SYNC_TIMEOUT_SECONDS: "60"}
    dist.init_process_group("gloo")
    own = dist.new_group(list(OWN))
    told: dict[str, Any] = {}
    ray.init(**ray_arguments)
    with RunContext.from_env(directory) as context:
        if dist.get_rank() == 0:  # the driver, which trains nothing here
            context.synchronizer()
        dist.barrier()
        if dist.get_rank() in OWN:
            module = fully_shard(Wide(), mesh=DeviceMesh.from_group(own, "cpu"))
            options: dict[str, Any] = {"shared_memory": False} if method == "nccl" else {}
            explorer = context.explorer("e") if dist.get_rank() == OWN[0] else None
            with WeightPublisher(
                context, TrainedModule(module), dtype=torch.bfloat16, group=own, **options
            ) as publisher:
                report = publisher.publish(1)
                told = {"bytes": report.bytes, "same_host": report.same_host}
                if explorer is not None:
                    weights = explorer.wait_and_fetch(0)
                    told["took"] = {n: content(t) for n, t in weights.state_dict.items()}
                    explorer.acknowledge(weights)
                    explorer.leave()
                dist.barrier(group=own)
        # A group that is made later still has one name on every rank.
        dist.barrier(group=dist.new_group([0, 1, 2]))
    return told


@pytest.mark.parametrize("method", ["memory", "nccl"])
def test_float32_masters_of_a_group_travel_as_bfloat16_in_half_the_bytes(
    method: str, tmp_path: Path, ray_of_ranks: dict[str, Any]
) -> None:
    ranks = run_ranks(publish_narrow, tmp_path, ray_of_ranks, method, world_size=3, seconds=150)
    nothing, lead, other = values_of(ranks)
    assert nothing == {}
    state = Wide().state_dict()
    wanted = {n: content(t.bfloat16() if t.is_floating_point() else t) for n, t in state.items()}
    assert lead["took"] == wanted
    whole = sum(tensor.nbytes for tensor in state.values())
    assert lead["bytes"] + other["bytes"] == pytest.approx(whole / 2, rel=0.001)
    assert lead["same_host"] == other["same_host"] == ()


# Delta.

VERSIONS = range(1, 5)


def far_away(reports: list[BroadcastReport | None]) -> None:
    """Let this process take the other end for another host's, where no memory is shared."""
    send = publishing.fsdp_sync_weight_nccl

    def sent(*arguments: Any) -> BroadcastReport | None:
        reports.append(send(*arguments))
        return reports[-1]

    setattr(publishing, "fsdp_sync_weight_nccl", sent)  # noqa: B010 - not for mypy
    receiver = partial(WeightReceiver, shared_memory=None)
    setattr(methods, "WeightReceiver", receiver)  # noqa: B010 - not for mypy
    setattr(upload, "node_id", lambda: "another")  # noqa: B010


def publish_deltas(directory: Path, ray_arguments: dict[str, Any], method: str) -> list[int]:
    """Versions that differ in one element of each shard; the bytes that each took to travel."""
    os.environ |= {env.SYNC_METHOD: method, env.SYNC_DELTA: "true", env.SYNC_TIMEOUT_SECONDS: "60"}
    dist.init_process_group("gloo")
    ray.init(**ray_arguments)
    reports: list[BroadcastReport | None] = []
    far_away(reports)
    made, travelled = engine("fsdp2"), []
    leads = dist.get_rank() == 0
    with RunContext.from_env(directory) as context:
        if leads:
            context.synchronizer()
        dist.barrier()
        explorer = context.explorer("far") if leads else None
        with WeightPublisher(context, made) as publisher:
            for version in VERSIONS:
                with torch.no_grad():
                    made.module.embed.weight.to_local()[0, 0] = version
                report = publisher.publish(version)
                assert (dict(report.lost), dict(report.refused)) == ({}, {})
                expected = {
                    name: content(tensor) for name, tensor in adapt(made).get_per_tensor_param()
                }
                if explorer is not None:
                    size, found = take(explorer, version)
                    assert {name: found[name] for name in expected} == expected
                    sent = reports[-1] if reports else None
                    travelled.append(size if sent is None else sent.delta_bytes or sent.bytes)
                dist.barrier()
        if explorer is not None:
            explorer.leave()
    return travelled


def take(explorer: Any, version: int) -> tuple[int, dict[str, Content]]:
    """The bytes that were fetched, and the tensors."""
    weights = explorer.wait_and_fetch(version - 1)
    found = {name: content(tensor) for name, tensor in weights.state_dict.items()}
    explorer.acknowledge(weights)
    return weights.bytes, found


@pytest.mark.timeout(300)
@pytest.mark.parametrize("method", ["memory", "nccl"])
def test_with_delta_only_what_changed_travels_after_the_first_version(
    method: str, tmp_path: Path, ray_of_ranks: dict[str, Any]
) -> None:
    ranks = run_ranks(publish_deltas, tmp_path, ray_of_ranks, method, seconds=240)
    travelled, _ = values_of(ranks)
    first, *others = travelled
    assert len(others) == len(VERSIONS) - 1
    assert all(0 < size < first / 10 for size in others), travelled
