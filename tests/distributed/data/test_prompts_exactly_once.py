"""Real kills of a trainer that has prompts in flight: the surviving history has each of them once.

``TRAINSYNC_DATA_KILLS`` says how often it is killed.
"""

import json
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Final, NamedTuple

import pytest
import torch
from trainsync import RunContext, load_sharded
from trainsync.data.cursor import Item

from tests.distributed.forked import CONTEXT, preload

KILLS: Final = int(os.environ.get("TRAINSYNC_DATA_KILLS", "5"))
LENGTH: Final = 23 * KILLS
EPOCHS, BATCH, AHEAD = 4, 3, 3
DEADLINE: Final = 30.0

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(60 + 6 * KILLS)]

preload("trainsync.runtime.context", "trainsync.checkpoint.coordinator", "trainsync.data.cursor")


class Step(NamedTuple):
    """One optimizer step; ``learned`` is the model's own count of all items up to it."""

    attempt: int
    step: int
    items: list[Item]
    learned: int


def train(directory: Path, journal: Path) -> None:
    """Train to the end of the data: three batches are in flight, and a drawn one is trained."""
    ctx = RunContext.from_env(directory)
    coordinator = ctx.coordinator(0, 1)
    model = torch.nn.Linear(1, 1, bias=False)  # its weight counts the items
    torch.nn.init.zeros_(model.weight)
    resume = ctx.resume()
    step = 0 if resume is None else load_sharded(resume, model=model).step
    cursor = ctx.data_cursor(LENGTH, epochs=EPOCHS, seed=3)
    draws, flying = random.Random(step), list[list[Item]]()
    with journal.open("a", buffering=1) as file:
        while not cursor.finished:
            while len(flying) < AHEAD and not cursor.exhausted:
                flying.append(cursor.take(BATCH))
            items = flying.pop(draws.randrange(len(flying)))
            with torch.no_grad():
                model.weight += len(items)
            cursor.trained(items)
            step += 1
            pairs = [(item.epoch, item.index) for item in items]
            file.write(json.dumps([ctx.attempt, step, pairs, int(model.weight.item())]) + "\n")
            coordinator.save(step, model=model, data_cursor=cursor)
    coordinator.finish(timeout=60)
    ctx.close()


def read(journal: Path) -> list[Step]:
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


def test_no_prompt_is_skipped_and_none_trained_twice_over_real_kills(tmp_path: Path) -> None:
    journal, draws, killed = tmp_path / "journal", random.Random(11), 0
    for attempt in range(1, KILLS + 2):
        process = CONTEXT.Process(target=train, args=(tmp_path / "run", journal))
        process.start()
        if attempt <= KILLS:
            before, more = len(read(journal)), draws.randint(1, 12)
            deadline = time.monotonic() + DEADLINE
            while process.is_alive() and len(read(journal)) < before + more:
                assert time.monotonic() < deadline, f"attempt {attempt} takes no step"
                time.sleep(draws.uniform(0, 0.01))  # the kill strikes anywhere in a step
            killed += process.is_alive()
            os.kill(process.pid or 0, signal.SIGKILL)
        process.join(60 + KILLS)  # the last one trains on what they left
        assert process.exitcode == (-signal.SIGKILL if attempt <= KILLS else 0)
    steps = read(journal)
    history = surviving(steps)
    assert killed == KILLS, "the data ended before the last kill"
    assert len(steps) > len(history), "no kill undid a step"
    assert [step.step for step in history] == list(range(1, len(history) + 1))
    trained = [item for step in history for item in step.items]
    assert Counter(trained) == Counter(Item(e, i) for e in range(EPOCHS) for i in range(LENGTH))
    assert history[-1].learned == EPOCHS * LENGTH, "the model learned from what the history says"
