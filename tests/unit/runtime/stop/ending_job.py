"""A training script that ends with a save in flight: ``python -m … HOW DIRECTORY TIMES``.

The script runs ``TIMES`` times in children forked after the import of torch, which end through the
interpreter's normal exit. The parent prints their exit codes and newest steps as JSON.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import torch
import trainsync
import trainsync.checkpoint.coordinator
import trainsync.monitor.client.local  # like the line before: imported once, and not in every child
from trainsync.api.protocol import SaveKind
from trainsync.integrations.verl.saving import exit_in_order_on_sigterm
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves.pointers import read_pointer

STEPS = 2
states: list[dict[str, torch.Tensor]] = []


def save(ctx: trainsync.RunContext, world_size: int = 1) -> trainsync.CheckpointCoordinator:
    """Save ``STEPS`` steps; the last saves are in flight on return."""
    coordinator = ctx.coordinator(0, world_size)
    for step in range(1, STEPS + 1):
        everyone = trainsync.all_ranks("model", world_size=world_size)
        coordinator.save_async("model", states[step - 1], step)
        coordinator.register(step, checkpoint_participants=everyone)
    return coordinator


def train(how: str, directory: str) -> None:
    """Train like a user: with a bug, or without waiting for the last save."""
    if how == "bug in with":
        with trainsync.RunContext.from_env(directory) as ctx:
            save(ctx)
            raise ValueError("a bug in training")
    ctx = trainsync.RunContext.from_env(directory)
    if how == "sigterm":
        exit_in_order_on_sigterm()
    if how == "other rank":
        save(ctx, world_size=2).wait_all(60.0)
        ctx.close(timeout=0.5)
    else:
        save(ctx)
    if how == "close":
        ctx.close()
    if how == "sigterm":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    if how == "bug":
        raise ValueError("a bug in training")


def main(how: str, root: str, times: int) -> None:
    """Fork the children; the parent has no threads, so a child gets only its memory."""
    torch.set_num_threads(1)
    states.extend({f"w{n}": torch.randn(500, 1000) for n in range(20)} for _ in range(STEPS))
    ended, children = [], []
    for number in range(times):
        run = RunDirectory(Path(root) / str(number))
        child = os.fork()
        if child == 0:
            with (run.root.parent / f"{number}.log").open("w") as log:
                os.dup2(log.fileno(), 2)
            return train(how, str(run.root))
        children.append((child, run))
    for child, run in children:
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        ended.append([code, read_pointer(run, SaveKind.CHECKPOINT)])
    print(json.dumps(ended), flush=True)
    return None


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
