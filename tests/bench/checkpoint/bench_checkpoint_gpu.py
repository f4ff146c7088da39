"""On a GPU: from device memory to staged memory, against one pinned copy; skipped without a GPU.

The limit is one flat copy of the same bytes from the device to pinned memory. The figure is how
long an immediate save blocks the trainer. The details have the overlapped save, and the slowdown of
ten forward and backward passes with AdamW steps by one such save.
"""

import statistics
from collections.abc import Callable

import torch
from trainsync.checkpoint.coordinator import CheckpointCoordinator

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
    """`d2h_vs_pinned_copy`, in bytes per second."""
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
        )
    ]


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
        for _ in range(3):
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
