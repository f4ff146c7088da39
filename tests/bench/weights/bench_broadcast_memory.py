"""Memory that a broadcast adds on the trainer's ranks, in buckets.

Two ranks hold three tensors of 100 MB, sharded by rows as in FSDP2, and small tensors that are
packed. One explorer gets the tensors over the wire.
"""

import multiprocessing
import os
from multiprocessing.connection import Connection
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from trainsync.engines.module_engine import TrainedModule
from trainsync.engines.publish.model_update_group import ModelUpdateGroup, fsdp_sync_weight_nccl
from trainsync.engines.trainer_ranks import trainer_ranks
from trainsync.weights.transports.broadcast.broadcaster import (
    DEFAULT_BUCKET_SIZE,
    WeightBroadcaster,
)
from trainsync.weights.transports.broadcast.deadlines import Deadlines
from trainsync.weights.transports.broadcast.receiver import WeightReceiver

from tests.bench.checkpoint.peak_memory import peak, resident
from tests.bench.harness import Figure
from tests.ports import port_of, reserved_port

RANKS: Final = 2
LARGE: Final = (5000, 5000)  # float32: 100 MB
LARGE_COUNT: Final = 3
SMALL_COUNT: Final = 100
VERSIONS: Final = 2
DEADLINES: Final = Deadlines(whole=120.0, bucket=60.0, connect=60.0, silence=60.0)
SECONDS: Final = 120.0


def model() -> torch.nn.Module:
    """This rank's shards, made without ever holding the full tensors."""
    mesh = init_device_mesh("cpu", (RANKS,))
    module = torch.nn.Module()
    for number in range(LARGE_COUNT):
        shard = torch.full((LARGE[0] // RANKS, LARGE[1]), float(number))
        whole = DTensor.from_local(shard, mesh, [Shard(0)], run_check=False)
        module.register_parameter(f"large{number}", torch.nn.Parameter(whole))
    for number in range(SMALL_COUNT):
        module.register_parameter(f"small{number}", torch.nn.Parameter(torch.zeros(1000)))
    return module


def train(rank: int, port: int, line: Connection) -> None:
    """A trainer rank; reports its peak memory above the start, in bytes."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    engine = TrainedModule(model())
    broadcaster = None
    if rank == 0:
        broadcaster = WeightBroadcaster(0, "127.0.0.1", deadlines=DEADLINES, shared_memory=None)
        line.send(broadcaster.endpoint)
        if not broadcaster.wait_for(1, SECONDS):
            raise RuntimeError("the explorer did not come")
    group = ModelUpdateGroup(trainer_ranks(SECONDS), broadcaster, DEADLINES)
    before = resident()
    for version in range(1, VERSIONS + 1):
        report = fsdp_sync_weight_nccl(engine, group, version)
        if report is not None and not report.served:
            raise RuntimeError(f"the explorer was not served: {report}")
    line.send(peak() - before)
    line.recv()
    os._exit(0)


def explore(line: Connection) -> None:
    """An explorer, until it gets a message."""
    torch.set_num_threads(1)
    endpoint = line.recv()
    with WeightReceiver("e", lambda: endpoint, deadlines=DEADLINES, shared_memory=None):
        line.recv()


def _heard(line: Connection) -> int:
    if not line.poll(SECONDS):
        raise RuntimeError(f"a rank said nothing for {SECONDS:.0f} s")
    found: int = line.recv()
    return found


def extra_bytes() -> list[int]:
    """Additional bytes of each trainer rank."""
    context = multiprocessing.get_context("spawn")
    with reserved_port() as reservation:
        port = port_of(reservation)
        pairs = [context.Pipe() for _ in range(RANKS + 1)]
        members = [
            context.Process(target=train, args=(rank, port, pairs[rank][1]), daemon=True)
            for rank in range(RANKS)
        ]
        members.append(context.Process(target=explore, args=(pairs[RANKS][1],), daemon=True))
        lines = [ours for ours, _ in pairs]
        try:
            for member in members:
                member.start()
            if not lines[0].poll(SECONDS):
                raise RuntimeError("rank 0 did not begin")
            lines[RANKS].send(lines[0].recv())
            extra = [_heard(line) for line in lines[:RANKS]]
            for line in lines:
                line.send("end")
            for member in members:
                member.join(20)
            return extra
        finally:
            for member in members:
                member.kill()
                member.join(20)


def run() -> list[Figure]:
    """`broadcast_peak_buckets`."""
    extra = extra_bytes()
    return [
        Figure(
            name="broadcast_peak_buckets",
            figure=max(extra) / DEFAULT_BUCKET_SIZE,
            unit="buckets",
            goal="<= 2",
            peer="the bytes of a bucket (16 MiB); the largest tensor is six of them",
            details={f"rank_{rank}_extra_bytes": float(size) for rank, size in enumerate(extra)},
        )
    ]
