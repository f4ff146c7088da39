"""On a GPU: packing, copy to the host, and CUDA IPC to another process; skipped without a GPU.

The product does not use CUDA IPC: explorers on the trainer's GPU get weights through shared memory.
The figure is the cost of that choice. NCCL does not support two ranks on one GPU.
"""

import statistics
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import Final

import torch
import torch.multiprocessing
from trainsync.weights.buckets.host_copy import HostCopy
from trainsync.weights.buckets.layout import plan_buckets
from trainsync.weights.buckets.tensor_stream import StreamSource, schema_of
from trainsync.weights.transports.broadcast.broadcaster import DEFAULT_BUCKET_SIZE

from tests.bench.harness import Figure, seconds, spread

TOTAL: Final = 1_000_000_000
COUNT: Final = 290
ROUNDS: Final = 7
WARM_UP: Final = 2
SECONDS: Final = 120.0


def run() -> Iterator[Figure]:
    """`gpu_pack_vs_copy`, `gpu_host_copy_vs_pinned` and `gpu_ipc_vs_shared_memory`."""
    if not torch.cuda.is_available():
        print("  no GPU here: nothing is measured, nothing is written")
        return
    device = torch.device("cuda")
    tensors = [
        (f"t{n}", torch.ones(TOTAL // COUNT // 2, device=device).bfloat16()) for n in range(COUNT)
    ]
    flat = torch.cat([tensor.view(torch.uint8) for _, tensor in tensors])
    yield _pack(tensors, flat)
    yield _to_host(flat)
    yield _hand_over(flat)


def _timed(call: Callable[[], object]) -> float:
    def whole() -> None:
        call()
        torch.accelerator.synchronize()

    torch.accelerator.synchronize()
    return seconds(whole)


def _figure(
    name: str, goal: str, peer: str, theirs: Callable[[], object], ours: Callable[[], object]
) -> Figure:
    """The peer's seconds over ours."""
    times = [(_timed(theirs), _timed(ours)) for _ in range(WARM_UP + ROUNDS)][WARM_UP:]
    return Figure(
        name,
        statistics.median(peer / own for peer, own in times),
        "times as fast",
        goal,
        peer,
        {
            "bytes": float(TOTAL),
            **spread("peer_seconds", [peer for peer, _ in times]),
            **spread("ours_seconds", [own for _, own in times]),
        },
    )


def _pack(tensors: list[tuple[str, torch.Tensor]], flat: torch.Tensor) -> Figure:
    """Pack into buckets on the GPU, and unpack."""
    schema = schema_of(tensors)
    buffer = torch.empty(DEFAULT_BUCKET_SIZE, dtype=torch.uint8, device=flat.device)
    target = torch.empty(schema.total, dtype=torch.uint8, device=flat.device)
    twice = torch.empty_like(flat)

    def ours() -> None:
        source = StreamSource(schema, tensors)
        for bucket in plan_buckets(schema, DEFAULT_BUCKET_SIZE):
            target[bucket.start : bucket.stop].copy_(source.pack(bucket, buffer))
        source.finish()

    def theirs() -> None:
        twice.copy_(flat)
        twice.copy_(flat)

    return _figure(
        "gpu_pack_vs_copy", ">= 0.5", "two flat copies of the bytes on the GPU", theirs, ours
    )


def _to_host(flat: torch.Tensor) -> Figure:
    """Copy piece by piece, and read each piece on the CPU, like the wire and the digest."""
    pinned = torch.empty(flat.numel(), dtype=torch.uint8, pin_memory=True)
    sink = torch.empty(flat.numel(), dtype=torch.uint8)
    copies = HostCopy()

    def ours() -> None:
        end = 0
        for piece in copies.pieces(flat):
            sink[end : end + piece.numel()].copy_(piece)
            end += piece.numel()

    def theirs() -> None:
        pinned.copy_(flat)
        sink.copy_(pinned)

    return _figure(
        "gpu_host_copy_vs_pinned",
        ">= 1",
        "one pinned copy of all, and then a copy of that on the host: nothing overlaps",
        theirs,
        ours,
    )


def _hand_over(flat: torch.Tensor) -> Figure:
    """Pass tensors to another process, which copies the bytes into its memory on the same GPU."""
    context = torch.multiprocessing.get_context("spawn")
    line, other = context.Pipe()
    shared = torch.empty(flat.numel(), dtype=torch.uint8).share_memory_()
    given = flat.clone()  # used on no other stream: its end is easier on the allocator
    process = context.Process(target=_take, args=(other, given, shared), daemon=True)
    process.start()
    try:
        _answer(line)  # the process has started

        def ours() -> None:
            line.send("ipc")
            _answer(line)

        def theirs() -> None:
            shared.copy_(flat)
            line.send("shared memory")
            _answer(line)

        return _figure(
            "gpu_ipc_vs_shared_memory",
            ">= 2",
            "the same bytes down to shared memory and up again",
            theirs,
            ours,
        )
    finally:
        line.send("end")  # so that the process lets go of this one's memory before it ends
        process.join(20)
        process.kill()


def _answer(line: Connection) -> None:
    if not line.poll(SECONDS):
        raise RuntimeError(f"the other process said nothing for {SECONDS:.0f} s")
    line.recv()


def _take(line: Connection, flat: torch.Tensor, shared: torch.Tensor) -> None:
    """The other process, which gets the GPU's memory by a CUDA IPC handle of torch."""
    own = torch.empty_like(flat)
    line.send("ready")
    while (way := line.recv()) != "end":
        own.copy_(flat if way == "ipc" else shared)
        torch.accelerator.synchronize()
        line.send("done")
