"""How long a save blocks the trainer: 1 GB of bf16 in 290 tensors, against peers, in turn.

The limit is one flat copy of the same bytes into touched memory, by torch (with its threads) or by
memmove, whichever is faster. The peers are `torch.distributed.checkpoint` (DCP) with three
stagers: the default one, which copies into new memory; a reused one that copies before it
returns; and a reused one that copies in a thread (`use_async_staging`), where the next step
must wait for the copy, as with our overlapped save. A stager is reused after the last save has
ended, as DCP requires. In all other ways the state may change when the call returns. The
overlapped save is compared with the fastest of the three, the immediate save with those that
make the same promise.

Each round takes the best of three for each way, in turn; a figure is the median of the rounds'
ratios.
"""

import ctypes
import logging
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

from tests.bench.checkpoint.checkpoint_state import (
    coordinator_in,
    forget_saves,
    model_state,
    scratch,
    size_of,
)
from tests.bench.harness import Figure, seconds, spread

ROUNDS = 6
WARM_UP = 1
TRIES = 3


class Ours:
    """Saves of a model with a guarded AdamW, as in a trainer."""

    def __init__(self, directory: Path, state: dict[str, torch.Tensor]) -> None:
        self.directory = directory
        self.state = state
        self.coordinator = coordinator_in(directory)
        self.step = 0
        # Only the moments matter: the save searches them for the optimizer's tensors.
        parameters = [torch.nn.Parameter(tensor) for tensor in state.values()]
        self.optimizer = torch.optim.AdamW(parameters)
        for parameter in parameters:
            self.optimizer.state[parameter] = {
                "step": torch.tensor(1.0),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
        self.coordinator.guard(self.optimizer)

    def save(self, *, overlapped: bool) -> float:
        self.step += 1
        blocked = seconds(
            lambda: self.coordinator.save_async(
                "model", self.state, self.step, overlapped=overlapped
            )
        )
        self.coordinator.wait_all(timeout=600)  # writing would disturb the next one
        forget_saves(self.directory)
        return blocked

    def step_wait(self, forward_backward: Callable[[], object]) -> float:
        """How long a save blocks a step, with ``forward_backward`` in between."""
        self.step += 1
        before = self.coordinator.stats.step_wait_seconds
        self.coordinator.save_async("model", self.state, self.step, overlapped=True)
        forward_backward()
        self.optimizer.step()  # without gradients the step only waits
        self.coordinator.wait_all(timeout=600)
        forget_saves(self.directory)
        return self.coordinator.stats.step_wait_seconds - before


class Peers:
    """The peers."""

    def __init__(self, directory: Path, state: dict[str, torch.Tensor]) -> None:
        self.directory = directory
        self.state = state
        self.count = 0
        self.stager = reusable_stager(overlapped=False)
        self.overlapped_stager = reusable_stager(overlapped=True)
        size = size_of(state)
        self.source = torch.ones(size, dtype=torch.uint8)
        self.target = torch.zeros(size, dtype=torch.uint8)

    def memcpy(self) -> float:
        target, source = self.target, self.source
        return min(
            seconds(lambda: target.copy_(source)),
            seconds(lambda: ctypes.memmove(target.data_ptr(), source.data_ptr(), source.numel())),
        )

    def dcp(self, **options: Any) -> float:
        self.count += 1
        return dcp_save(self.state, self.directory / str(self.count), **options)

    def torch_save(self, directory: Path) -> float:
        path = directory / "torch_save.pt"

        def save() -> None:
            with path.open("wb") as file:
                torch.save(self.state, file)
                file.flush()
                os.fsync(file.fileno())

        spent = seconds(save)
        path.unlink()
        return spent


def dcp_save(state: dict[str, torch.Tensor], path: Path, **options: Any) -> float:
    """Seconds until DCP's call returns; the save is over, and removed, when this returns."""
    started = time.perf_counter()
    saving = dcp.async_save(state, checkpoint_id=path, **options)
    blocked = time.perf_counter() - started
    if isinstance(saving, AsyncSaveResponse):
        saving.staging_completion.result()
        saving = saving.upload_completion
    saving.result()
    for file in sorted(path.rglob("*"), reverse=True):
        file.unlink()
    return blocked


def reusable_stager(*, overlapped: bool) -> DefaultStager:
    """A stager with ordinary memory: pinned memory needs a GPU, shared memory another process."""
    return DefaultStager(
        StagingOptions(
            use_pinned_memory=False,
            use_shared_memory=False,
            use_async_staging=overlapped,
            use_non_blocking_copy=False,
        )
    )


@contextmanager
def process_group(directory: Path) -> Iterator[None]:
    """A group of one rank, which DCP requires."""
    dist.init_process_group("gloo", f"file://{directory}/store", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


def run() -> list[Figure]:
    """`checkpoint_blocked_immediate_vs_memcpy`, `…_overlapped_vs_memcpy`, `…_vs_dcp`."""
    warnings.filterwarnings("ignore", module="torch.distributed")
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    state = model_state()
    with scratch(in_memory=True) as memory, scratch() as disk, process_group(memory):
        ours, peers = Ours(memory / "run", state), Peers(memory / "dcp", state)
        measured = {
            "memcpy": peers.memcpy,
            "immediate": lambda: ours.save(overlapped=False),
            "overlapped": lambda: ours.save(overlapped=True),
            "dcp_default": peers.dcp,
            "dcp_reused": lambda: peers.dcp(async_stager=peers.stager),
            "dcp_overlapped": lambda: peers.dcp(async_stager=peers.overlapped_stager),
        }
        took: dict[str, list[float]] = {name: [] for name in measured}
        for round_ in range(WARM_UP + ROUNDS):
            best = dict.fromkeys(measured, float("inf"))
            for _ in range(TRIES):
                for name, call in measured.items():
                    best[name] = min(best[name], call())
            if round_ >= WARM_UP:
                for name, value in best.items():
                    took[name].append(value)
        waits = {
            "step_wait_seconds_at_once": ours.step_wait(lambda: None),
            "step_wait_seconds_after_0.5_s_of_matmul": ours.step_wait(lambda: matmul(0.5)),
            "torch_save_fsync_seconds": min(peers.torch_save(disk) for _ in range(TRIES)),
        }
        peers.stager.close()
        peers.overlapped_stager.close()
    free = [min(two) for two in zip(took["dcp_default"], took["dcp_reused"], strict=True)]
    best_of_all = [min(two) for two in zip(free, took["dcp_overlapped"], strict=True)]
    details = {"bytes": float(size_of(state)), "tensors": float(len(state)), "rounds": ROUNDS}
    for name, values in took.items():
        details |= spread(f"{name}_seconds", values)
    memcpy = "one warm flat copy of the same bytes, the faster of torch and memmove"
    return [
        Figure(
            name="checkpoint_blocked_immediate_vs_memcpy",
            figure=ratio(took["immediate"], took["memcpy"]),
            unit="ratio of seconds",
            goal="<= 1.1",
            peer=memcpy,
            details=details,
        ),
        Figure(
            name="checkpoint_blocked_overlapped_vs_memcpy",
            figure=ratio(took["overlapped"], took["memcpy"]),
            unit="ratio of seconds",
            goal="<= 0.1",
            peer=memcpy,
            details=details | waits,
        ),
        Figure(
            name="checkpoint_blocked_vs_dcp",
            figure=ratio(took["overlapped"], best_of_all),
            unit="ratio of seconds",
            goal="<= 0.6",
            peer="DCP async_save, the best of its default stager, one that is reused, and one "
            "that is reused and copies in a thread",
            details=details
            | waits
            | {
                "overlapped_vs_dcp_overlapped": ratio(took["overlapped"], took["dcp_overlapped"]),
                "immediate_vs_dcp_default": ratio(took["immediate"], took["dcp_default"]),
                "immediate_vs_dcp_reused": ratio(took["immediate"], took["dcp_reused"]),
            },
        ),
    ]


def ratio(ours: list[float], theirs: list[float]) -> float:
    """Median of the rounds' ratios."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def matmul(duration: float) -> None:
    """Keep torch's threads busy, like a forward and backward pass."""
    a = torch.ones(512, 512)
    end = time.perf_counter() + duration
    while time.perf_counter() < end:
        a @ a
