"""A training script that ends with a save in flight: ``python -m … DIRECTORY HOW…``.

The script runs once for each ``HOW`` in children forked after the import of torch, which end
through the interpreter's normal exit. The parent prints the exit codes and newest steps
as JSON, by the way to end.
"""

import gc
import json
import os
import signal
import sys
import time
from collections import Counter
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
    if how == "closed":
        ctx.close()
    if how == "sigterm":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
    if how == "bug":
        raise ValueError("a bug in training")


def main(root: Path, ways: list[str]) -> None:
    """Run every script, those of one way together; a child returns, to end, when it has trained."""
    torch.set_num_threads(1)
    states.extend({f"w{n}": torch.randn(500, 1000) for n in range(20)} for _ in range(STEPS))
    ended = {}
    gc.collect()
    gc.freeze()  # else each child looks through all of torch at its end
    for how, times in Counter(ways).items():
        (root / how).mkdir()
        children = fork(how, root / how, times)
        if children is None:
            return
        ended[how] = [end_of(child, directory) for directory, child in children.items()]
    print(json.dumps(ended), flush=True)


def fork(how: str, root: Path, times: int) -> dict[Path, int] | None:
    """The children's run directories and pids; in a child None, when it has trained.

    The parent has no threads, so a child gets only its memory.
    """
    children = {}
    for number in range(times):
        directory = root / str(number)
        child = os.fork()
        if child == 0:
            with directory.with_name(f"{number}.log").open("w") as log:
                os.dup2(log.fileno(), 2)
            train(how, str(directory))
            return None
        children[directory] = child
    return children


def end_of(child: int, directory: Path) -> tuple[int, int | None]:
    """Exit code and newest committed step."""
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return code, read_pointer(RunDirectory(directory), SaveKind.CHECKPOINT)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
