"""What a trainer loses to kill -9: steps, and prompts of its data.

A trainer with shards in memory saves in each step, has three batches in flight, and is killed with
SIGKILL at drawn instants, ``TRAINSYNC_BENCH_KILLS`` times (20), as in
``tests/distributed/data/test_prompts_exactly_once.py``. A step takes 0.3 s, as in the example (a
sleep; the model is tiny). A step is lost when it had ended, that is, its optimizer step was taken,
and the next attempt takes it again; the step in flight is lost besides.

Prompts are counted in the history that the last model has, which also counts them itself: skipped
ones were never trained, repeated ones more than once in an epoch.
"""

import os
import statistics
from collections import Counter
from typing import Any, Final

from tests.bench.checkpoint.checkpoint_state import scratch
from tests.bench.harness import Figure

KILLS: Final = int(os.environ.get("TRAINSYNC_BENCH_KILLS", "20"))
STEP_SECONDS: Final = 0.3
PROMPTS: Final = 6 * KILLS  # 8 steps a kill, of which an attempt takes about 3
BUDGET: Final = "64Mi"


def run() -> list[Figure]:
    """`steps_lost_max`, `prompts_skipped` and `prompts_repeated`."""
    found = over_kills()
    details = {
        "kills": float(found["kills"]),
        "prompts": float(found["prompts"]),
        "kills_that_lost_a_step": float(sum(steps > 0 for steps in found["lost"])),
        "steps_lost_mean": statistics.mean(found["lost"]),
    }
    return [
        Figure("steps_lost_max", max(found["lost"]), "steps", "<= 1", "none lost", details),
        *(
            Figure(
                f"prompts_{what}",
                found[what],
                "prompts",
                "<= 0",
                "each prompt once in an epoch",
                details,
            )
            for what in ("skipped", "repeated")
        ),
    ]


def over_kills() -> dict[str, Any]:
    """One run over `KILLS` kills: what it has lost, and its prompts.

    Raises:
        RuntimeError: A kill struck no training, or the model has counted other prompts than the
            history has.
    """
    from trainsync.api import env
    from trainsync.data.cursor import Item

    from tests.distributed.data.killed_trainer import EPOCHS, lost, surviving, train_over_kills

    with scratch() as directory, scratch(in_memory=True) as memory:
        steps, killed = train_over_kills(
            directory,
            KILLS,
            prompts=PROMPTS,
            most_steps=3,
            step_seconds=STEP_SECONDS,
            environment={
                env.CHECKPOINT_MEMORY: BUDGET,
                env.CHECKPOINT_MEMORY_DIR: str(memory),
                env.CHECKPOINT_INTERVAL: "1",
            },
        )
    history = surviving(steps)
    trained = Counter(item for step in history for item in step.items)
    if killed != KILLS or history[-1].learned != trained.total():
        raise RuntimeError(
            f"{killed} of {KILLS} kills struck, and the model has learned from"
            f" {history[-1].learned} prompts where the history has {trained.total()}"
        )
    wanted = {Item(epoch, index) for epoch in range(EPOCHS) for index in range(PROMPTS)}
    return {
        "kills": killed,
        "lost": lost(steps),
        "prompts": len(wanted),
        "skipped": len(wanted - set(trained)),
        "repeated": sum(count - 1 for count in trained.values()),
    }
