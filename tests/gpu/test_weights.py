"""Weights of a GPU arrive at an explorer as they were, by each way that one GPU can try."""

import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch
from trainsync.weights.buckets.device_digest import DeviceDigest
from trainsync.weights.buckets.host_copy import HostCopy
from trainsync.weights.transports.broadcast.broadcaster import WeightBroadcaster
from trainsync.weights.transports.broadcast.deadlines import Deadlines
from trainsync.weights.transports.broadcast.receiver import WeightReceiver
from trainsync.weights.transports.process_group.backend import (
    NCCL,
    RankSpec,
    exact,
    offer,
    reach_store,
    serve_store,
)
from trainsync.weights.transports.process_group.generation import WeightGroup
from trainsync.weights.transports.shared_memory.segment import SHARED_MEMORY

DEADLINES = Deadlines(whole=60.0, bucket=20.0, connect=20.0, silence=20.0)
GPU = torch.device("cuda")
WAYS = ["chain", "shared memory", "delta"]

Tensors = list[tuple[str, torch.Tensor]]


def weights(version: int) -> Tensors:
    generator = torch.Generator(device=GPU).manual_seed(version // 10)
    large = torch.randn(3_000_001, device=GPU, generator=generator).bfloat16()
    large[version::97] = version  # some of the elements change with each version
    return [
        ("large", large),
        ("small", torch.full((3, 5), float(version), device=GPU)),
        ("eight", torch.full((1001,), version, device=GPU).to(torch.float8_e4m3fn)),
        ("strided", torch.arange(999, device=GPU)[::3] + version),
        ("empty", torch.empty(0, 3, device=GPU)),
        ("on the host", torch.arange(10) + version),
    ]


def trainer_and_explorers(
    stack: ExitStack, way: str
) -> tuple[WeightBroadcaster, list[WeightReceiver]]:
    """A broadcaster, and two receivers that want their tensors on the broadcaster's GPU."""
    memory = SHARED_MEMORY if way == "shared memory" else None
    trainer = stack.enter_context(
        WeightBroadcaster(
            0,
            "127.0.0.1",
            bucket_size=1 << 20,
            deadlines=DEADLINES,
            shared_memory=memory,
            delta=way == "delta",
        )
    )
    explorers = [
        stack.enter_context(
            WeightReceiver(
                name,
                lambda: trainer.endpoint,
                deadlines=DEADLINES,
                shared_memory=memory,
                device=GPU,
            )
        )
        for name in ("a", "b")
    ]
    assert trainer.wait_for(2, 20.0)
    return trainer, explorers


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize("way", WAYS)
def test_versions_of_a_gpu_arrive_through_host_memory_bit_for_bit(
    way: str, stack: ExitStack
) -> None:
    trainer, explorers = trainer_and_explorers(stack, way)
    for version in range(1, 6):
        tensors = weights(version)
        report = trainer.broadcast(version, lambda tensors=tensors: iter(tensors))
        assert report.served == ("a", "b"), report
        assert report.group == ()  # NCCL refuses two members on one GPU
        for explorer in explorers:
            with explorer.reading() as served:
                assert served is not None and served.version == version
                for name, tensor in tensors:
                    assert torch.equal(raw(served.tensors[name]), raw(tensor)), (name, version)


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8)


def test_a_version_has_what_kernels_write_that_were_queued_before_the_broadcast(
    stack: ExitStack,
) -> None:
    trainer, explorers = trainer_and_explorers(stack, "chain")
    target, source = torch.zeros(5_000_000, device=GPU), torch.randn(5_000_000, device=GPU)
    torch.cuda._sleep(400_000_000)
    target.copy_(source)
    assert trainer.broadcast(1, lambda: iter([("w", target)])).served == ("a", "b")
    target.fill_(7)
    for explorer in explorers:
        with explorer.reading() as served:
            assert served is not None and torch.equal(raw(served.tensors["w"]), raw(source))


@pytest.mark.parametrize("size", [1, 2 << 20, (2 << 20) + 1, 50_000_003])
def test_pieces_on_the_host_have_every_byte_of_the_gpu_in_order(size: int) -> None:
    data = torch.randint(0, 256, (size,), dtype=torch.uint8, device=GPU)
    copies = HostCopy()
    for _ in range(2):
        assert torch.equal(torch.cat([p.clone() for p in copies.pieces(data)]), data.cpu())


def test_a_digest_that_the_gpu_takes_is_that_of_the_same_bytes_on_the_cpu() -> None:
    digests = []
    tensors = [torch.randn(5_000_003, device=GPU).bfloat16(), torch.randn(11, 3, device=GPU).t()]
    for device in ("cuda", "cpu"):
        taken = DeviceDigest()
        for tensor in tensors:
            taken.update(tensor.to(device).contiguous())
        digests.append(taken.result())
    assert digests[0] == digests[1]


def test_an_nccl_group_of_this_torch_is_made_and_sends_and_is_given_up_at_once() -> None:
    device = exact(GPU)
    assert offer(NCCL, device) is not None
    store = serve_store(20.0)
    spec = RankSpec(NCCL, "g", "secret", 0, 1, "127.0.0.1", device)
    end = time.monotonic() + 60
    group = WeightGroup(
        spec, lambda: reach_store("127.0.0.1", store.port, 20.0), end, 120.0, lambda: ""
    )
    data = torch.arange(1000, device=device).view(torch.uint8)
    before = data.clone()
    group.begin(data, end)
    assert torch.equal(group.finish(end), before)
    began = time.monotonic()
    group.abort()
    assert time.monotonic() - began < 1.0
