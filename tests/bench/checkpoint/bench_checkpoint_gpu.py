"""On a GPU: from device memory to staged memory, against one pinned copy and against DCP; skipped
without a GPU.

The limit is one flat copy of the same bytes from the device to pinned memory. The first figure is
how long an immediate save blocks the trainer. The second is the overlapped save beside DCP's
`async_save` with pinned memory that is reused, the faster of a copy before it returns and a copy in
a thread. The details have the slowdown of ten forward and backward passes with AdamW steps by one
overlapped save.
"""

import logging
import statistics
import warnings
from collections.abc import Callable

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from trainsync.checkpoint.coordinator import CheckpointCoordinator

from tests.bench.checkpoint.bench_checkpoint_blocked import dcp_save, process_group, ratio
from tests.bench.checkpoint.checkpoint_state import (
    coordinator_in,
    forget_saves,
    model_state,
    scratch,
    size_of,
)
from tests.bench.harness import Figure, seconds, spread

ROUNDS = 7
WARM_UP = 2
WIDTH, DEPTH, BATCH, STEPS = 4096, 15, 4096, 10  # the loop's model: 1 GB of float32


def run() -> list[Figure]:
    """`d2h_vs_pinned_copy`, in bytes per second, and `gpu_blocked_vs_dcp`."""
    if not torch.accelerator.is_available():
        print("  no GPU here: nothing is measured, nothing is written")
        return []
    device = torch.accelerator.current_accelerator()
    state = {name: tensor.to(device) for name, tensor in model_state().items()}
    size = size_of(state)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty(size, dtype=torch.uint8, pin_memory=True)

    def copy() -> None:
        target.copy_(source, non_blocking=True)
        torch.accelerator.synchronize()

    copies, saves = [], []
    with scratch(in_memory=True) as directory:
        coordinator = coordinator_in(directory)
        for step in range(1, WARM_UP + ROUNDS + 1):
            torch.accelerator.synchronize()
            plain = min(seconds(copy), seconds(copy))
            spent = seconds(lambda at=step: coordinator.save_async("model", state, at))
            coordinator.wait_all(timeout=600)
            forget_saves(directory)
            if step > WARM_UP:
                copies.append(plain)
                saves.append(spent)
    against_dcp = beside_dcp(state)
    return [
        Figure(
            name="d2h_vs_pinned_copy",
            figure=statistics.median(c / s for c, s in zip(copies, saves, strict=True)),
            unit="ratio of bytes per second",
            goal=">= 0.9",
            peer="one flat copy of the same bytes from the device to pinned memory",
            details={
                "bytes": size,
                **spread("save_seconds", saves),
                **spread("pinned_copy_seconds", copies),
                **loop(device),
            },
        ),
        against_dcp,
    ]


def beside_dcp(state: dict[str, torch.Tensor]) -> Figure:
    """An overlapped save of a guarded optimizer's parameters, and DCP's, in turn."""
    warnings.filterwarnings("ignore", module="torch.distributed")
    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    parameters = [torch.nn.Parameter(tensor) for tensor in state.values()]
    took: dict[str, list[float]] = {"ours": [], "dcp": [], "dcp_thread": []}
    with scratch(in_memory=True) as directory, process_group(directory):
        coordinator = coordinator_in(directory / "run")
        optimizer = torch.optim.AdamW(parameters)
        coordinator.guard(optimizer)  # which keeps no reference to it
        stagers = {"dcp": pinned_stager(thread=False), "dcp_thread": pinned_stager(thread=True)}
        for step in range(1, WARM_UP + ROUNDS + 1):
            spent = {
                "ours": seconds(
                    lambda at=step: coordinator.save_async("model", state, at, overlapped=True)
                )
            }
            coordinator.wait_all(timeout=600)
            forget_saves(directory / "run")
            for name, stager in stagers.items():
                torch.accelerator.synchronize()
                spent[name] = dcp_save(state, directory / name / str(step), async_stager=stager)
            for name, value in spent.items() if step > WARM_UP else ():
                took[name].append(value)
        for stager in stagers.values():
            stager.close()
    best = [min(two) for two in zip(took["dcp"], took["dcp_thread"], strict=True)]
    details = {"bytes": float(size_of(state))}
    for name, values in took.items():
        details |= spread(f"{name}_seconds", values)
    return Figure(
        name="gpu_blocked_vs_dcp",
        figure=ratio(took["ours"], best),
        unit="ratio of seconds",
        goal="<= 0.6",
        peer="DCP async_save with reused pinned memory, the faster of a stager that copies before "
        "it returns and one that copies in a thread",
        details=details,
    )


def pinned_stager(*, thread: bool) -> DefaultStager:
    """DCP's stager for a GPU, with its memory kept from save to save."""
    stager = DefaultStager(
        StagingOptions(
            use_pinned_memory=True,
            use_shared_memory=False,
            use_async_staging=thread,
            use_non_blocking_copy=True,
        )
    )
    # torch 2.11 drops the memory after each save, and cannot use a stager twice; 2.15 keeps it.
    stager._state_dict_stager.close = lambda: None  # type: ignore[method-assign]
    return stager


def loop(device: torch.device | None) -> dict[str, float]:
    """The cost of an overlapped save in every ten steps of a training loop on the device."""
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = torch.randn(BATCH, WIDTH, device=device)

    def step() -> None:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    with scratch(in_memory=True) as directory:
        coordinator = coordinator_in(directory)
        coordinator.guard(optimizer)
        for _ in range(2 * STEPS):  # until its clocks are up
            step()
        without = seconds(lambda: _steps(step))
        saves = Saves(coordinator, model)
        saves.save()  # allocates the pinned memory
        coordinator.wait_all(timeout=600)
        blocked: list[float] = []
        spent = 0.0
        for _ in range(STEPS):
            blocked.append(seconds(saves.save))
            spent += blocked[-1] + seconds(lambda: _steps(step))
            coordinator.wait_all(timeout=600)  # measure the copy, not the disk
            forget_saves(directory)
    return {
        "loop_overlapped_blocked_seconds_median": statistics.median(blocked),
        "loop_seconds_for_10_steps": without,
        "loop_seconds_for_10_steps_with_one_save": spent / STEPS,
    }


class Saves:
    """Overlapped saves of a model, one after another."""

    def __init__(self, coordinator: CheckpointCoordinator, model: torch.nn.Module) -> None:
        self.coordinator = coordinator
        self.model = model
        self.step = 0

    def save(self) -> None:
        self.step += 1
        self.coordinator.save_async("model", self.model.state_dict(), self.step, overlapped=True)


def _steps(step: Callable[[], None]) -> None:
    for _ in range(STEPS):
        step()
    torch.accelerator.synchronize()
