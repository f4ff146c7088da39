"""FSDP2 over NCCL on a GPU is killed; the losses go on as if it had not been, to the last bit."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.ranks import run_ranks, values_of

pytestmark = pytest.mark.timeout(300)

LAST, KILLED_IN = 10, 7
COMPONENTS = ("model", "optim", "extra_state")


def train(directory: Path, killed_in: int | None, overlapped: bool) -> dict[str, Any]:
    """Losses by step, and digests of the state at the end, of one rank."""
    import asyncio

    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from trainsync import RunContext, all_ranks, load_sharded, training_state

    from tests.distributed.checkpoint.resume_job import whole_state

    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    context = RunContext.from_env(directory)
    coordinator = context.coordinator()
    torch.manual_seed(0)
    layers = [torch.nn.Linear(256, 256), torch.nn.Dropout(0.4), torch.nn.Linear(256, 256)]
    model = torch.nn.Sequential(*layers).cuda()
    fully_shard(model[0])
    fully_shard(model[2])
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if overlapped:
        coordinator.guard(optimizer)
    torch.manual_seed(1000 + context.attempt)  # only the checkpoint gives the GPU's generator back
    first = 1
    resume = context.resume()
    if resume is not None:
        load_sharded(resume, model=model, optimizer=optimizer, timeout=60)
        first = resume.step + 1
    losses = {}
    for step in range(first, LAST + 1):
        if step == killed_in:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = model(torch.randn(32, 256, device="cuda")).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[step] = float(loss.detach())
        if step % 2 == 0:
            coordinator.save_async("model", model.state_dict(), step, overlapped=overlapped)
            coordinator.save_async("optim", optimizer.state_dict(), step, overlapped=overlapped)
            coordinator.save_async("extra_state", training_state(), step)
            coordinator.register(step, checkpoint_participants=all_ranks(*COMPONENTS, world_size=1))
        if step == 4:
            coordinator.wait_all(60)
    coordinator.wait_all(60)
    asyncio.run(coordinator.register_and_monitor(LAST, timeout=60))
    model.cpu()
    state = whole_state(model, torch.optim.AdamW(model.parameters()))
    context.close()
    return {"losses": losses, "state": state}


@pytest.mark.parametrize("overlapped", [False, True], ids=["immediate", "overlapped"])
def test_the_losses_after_a_kill_are_those_of_a_run_that_nothing_disturbed(
    tmp_path: Path, overlapped: bool
) -> None:
    def run(name: str, killed_in: int | None) -> Any:
        return run_ranks(train, tmp_path / name, killed_in, overlapped, world_size=1, seconds=140)

    (whole,) = values_of(run("whole", None))
    (victim,) = run("cut", KILLED_IN)
    assert victim.exit_code == -signal.SIGKILL, victim.error
    (rest,) = values_of(run("cut", None))
    first = min(rest["losses"])
    assert first in (5, 7)  # the save of step 6 was whole when the trainer died, or not
    assert rest["losses"] == {n: loss for n, loss in whole["losses"].items() if n >= first}
    assert rest["state"] == whole["state"]
    assert len(set(whole["losses"].values())) == LAST
