"""A trainer that has prompts in flight, is killed again and again, and writes down its history."""

import itertools
import json
import os
import random
import signal
import time
from pathlib import Path
from typing import Final, NamedTuple

import torch
from trainsync import RunContext, load_sharded
from trainsync.data.cursor import Item

from tests.distributed.processes.forked import CONTEXT, preload

EPOCHS: Final = 4
BATCH, AHEAD = 3, 3
DEADLINE: Final = 60.0

preload("trainsync.runtime.context", "trainsync.checkpoint.coordinator", "trainsync.data.cursor")


class Step(NamedTuple):
    """One optimizer step; ``learned`` is the model's own count of all items up to it."""

    attempt: int
    step: int
    items: list[Item]
    learned: int


def length(kills: int) -> int:
    """Prompts of an epoch, so many that the data outlasts these kills."""
    return 23 * kills


def train(
    directory: Path,
    journal: Path,
    prompts: int,
    step_seconds: float = 0.0,
    environment: dict[str, str] | None = None,
) -> None:
    """Train to the end of the data: three batches are in flight, and a drawn one is trained."""
    os.environ |= environment or {}
    ctx = RunContext.from_env(directory)
    coordinator = ctx.coordinator(0, 1)
    model = torch.nn.Linear(1, 1, bias=False)  # its weight counts the items
    torch.nn.init.zeros_(model.weight)
    resume = ctx.resume()
    step = 0 if resume is None else load_sharded(resume, model=model).step
    cursor = ctx.data_cursor(prompts, epochs=EPOCHS, seed=3)
    draws, flying = random.Random(step), list[list[Item]]()
    with journal.open("a", buffering=1) as file:
        while not cursor.finished:
            while len(flying) < AHEAD and not cursor.exhausted:
                flying.append(cursor.take(BATCH))
            items = flying.pop(draws.randrange(len(flying)))
            time.sleep(step_seconds)  # in place of a larger model's work
            with torch.no_grad():
                model.weight += len(items)
            cursor.trained(items)
            step += 1
            pairs = [(item.epoch, item.index) for item in items]
            file.write(json.dumps([ctx.attempt, step, pairs, int(model.weight.item())]) + "\n")
            coordinator.save(step, model=model, data_cursor=cursor)
    coordinator.finish(timeout=60)
    ctx.close()


def train_over_kills(
    directory: Path,
    kills: int,
    *,
    prompts: int,
    most_steps: int = 12,
    step_seconds: float = 0.0,
    environment: dict[str, str] | None = None,
) -> tuple[list[Step], int]:
    """Kill the trainer with SIGKILL so often, at drawn instants, then train to the end.

    Args:
        prompts: of an epoch.
        most_steps: that an attempt takes before its kill; at least 1.
        step_seconds: that each step sleeps.
        environment: of the trainer.

    Returns:
        The steps of all attempts in the order they were taken, and how many kills struck a trainer
        that still trained.

    Raises:
        AssertionError: An attempt takes no step in time, or does not end as it should.
    """
    journal, draws, killed = directory / "journal", random.Random(11), 0
    whole = EPOCHS * prompts / BATCH
    for attempt in range(1, kills + 2):
        arguments = (directory / "run", journal, prompts, step_seconds, environment)
        process = CONTEXT.Process(target=train, args=arguments)
        process.start()
        if attempt <= kills:
            before, more = len(read(journal)), draws.randint(1, most_steps)
            deadline = time.monotonic() + DEADLINE + more * step_seconds
            while process.is_alive() and len(read(journal)) < before + more:
                assert time.monotonic() < deadline, f"attempt {attempt} takes no step"
                time.sleep(draws.uniform(0, 0.01))  # the kill strikes anywhere in a step
            time.sleep(draws.uniform(0, step_seconds))  # anywhere in a step that sleeps, too
            killed += process.is_alive()
            os.kill(process.pid or 0, signal.SIGKILL)
        process.join(60 + kills + whole * step_seconds)  # the last one trains on what they left
        assert process.exitcode == (-signal.SIGKILL if attempt <= kills else 0)
    return read(journal), killed


def read(journal: Path) -> list[Step]:
    """The steps of a journal; a line that a kill cut off is left out."""
    lines = journal.read_text().splitlines(keepends=True) if journal.exists() else []
    fields = [json.loads(line) for line in lines if line.endswith("\n")]
    return [Step(a, s, [Item(*item) for item in items], n) for a, s, items, n in fields]


def surviving(steps: list[Step]) -> list[Step]:
    """The history that the last model has: an attempt undoes the steps from its first on."""
    history: dict[int, Step] = {}
    for step in steps:
        if step.step in history and history[step.step].attempt != step.attempt:
            history = {number: old for number, old in history.items() if number < step.step}
        history[step.step] = step
    return [history[number] for number in sorted(history)]


def lost(steps: list[Step]) -> list[int]:
    """Of each kill, the finished steps that the next attempt takes again."""
    return [
        before.step + 1 - after.step
        for before, after in itertools.pairwise(steps)
        if before.attempt != after.attempt
    ]
