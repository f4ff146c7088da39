"""A process group of torch for weights, apart from those that the process trains with.

What is peculiar to a backend is here. NCCL takes bytes from GPU to GPU. gloo takes them from host
to host with the same calls: the tests use it; our own chain is faster there.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from trainsync.weights.transports.broadcast.link import Frame

NCCL: Final = "nccl"
GLOO: Final = "gloo"
LOCAL: Final = "localhost"

_DEVICES: Final = {NCCL: "cuda", GLOO: "cpu"}

_QUIET_NCCL: Final = {
    # Else torch's watchdog ends the process when a member is gone, or when it takes itself for
    # stuck. The callers here have deadlines of their own, and go on without the group.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
_environment = threading.Lock()


@dataclass(frozen=True)
class RankSpec:
    """One rank of a generation of the group.

    Attributes:
        name: of the generation.
        secret: under which its members find each other in the store.
        rank: 0 is the trainer, which sends.
        address: of this host, at which the others reach it.
        device: of the tensors.
    """

    backend: str
    name: str
    secret: str = field(repr=False)
    rank: int
    size: int
    address: str
    device: torch.device


def fits(backend: str, device: torch.device) -> bool:
    """Whether tensors on this device travel by the backend."""
    there = dist.is_nccl_available() if backend == NCCL else dist.is_gloo_available()
    return there and device.type == _DEVICES[backend]


def exact(device: torch.device) -> torch.device:
    """The device with its number: "cuda" alone is the current GPU."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def offer(backend: str, device: torch.device) -> Frame | None:
    """The offer of an explorer that wants its tensors on ``device``; None: no group."""
    if not fits(backend, device):
        return None
    return {"backend": backend, "gpu": gpu_of(device)}


def gpu_of(device: torch.device) -> str | None:
    """The UUID of a GPU, since NCCL refuses two members on one. None for a CPU."""
    if device.type != "cuda":
        return None
    return str(torch.cuda.get_device_properties(device).uuid)


def serve_store(seconds: float) -> TCPStore:
    """Where members find each other: the trainer's. ``port`` is the system's choice."""
    limit = timedelta(seconds=seconds)
    return TCPStore(LOCAL, 0, None, True, limit, wait_for_workers=False)


def reach_store(host: str, port: int, seconds: float) -> Store:
    """The trainer's store, from an explorer. Blocks without a limit if the trainer is stopped."""
    limit = timedelta(seconds=seconds)
    return TCPStore(host, port, None, False, limit, wait_for_workers=False)


def make_group(spec: RankSpec, store: Store, seconds: float) -> Any:
    """The ``torch.distributed.Backend`` of one rank. Blocks until all are there; see `WeightGroup`.

    Args:
        seconds: that the backend itself may wait in a collective, where it has such a bound.

    Raises:
        RuntimeError: of torch.
    """
    named = PrefixStore(spec.secret, store)
    limit = timedelta(seconds=seconds)
    if spec.backend == NCCL:
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = limit  # of the watchdog, which then only notes it
        with _set(_QUIET_NCCL):  # they are read when a group is made
            return dist.ProcessGroupNCCL(named, spec.rank, spec.size, nccl)
    gloo: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined] # torch's stubs lack it
    gloo._timeout = limit
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=spec.address)]
    return dist.ProcessGroupGloo(named, spec.rank, spec.size, gloo)


def begin_broadcast(group: Any, data: torch.Tensor) -> Any:
    """Rank 0's ``data`` to all others' (uint8, contiguous); the ``torch.distributed.Work``."""
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = 0, 0
    options.asyncOp = True  # on a stream of its own, beside what is packed meanwhile
    return group.broadcast([data], options)


@contextmanager
def _set(values: dict[str, str]) -> Iterator[None]:
    with _environment:
        before = {name: os.environ.get(name) for name in values}
        os.environ.update(values)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    del os.environ[name]
                else:
                    os.environ[name] = value
