"""Real kills of a trainer that has prompts in flight: the surviving history has each of them once.

``TRAINSYNC_DATA_KILLS`` says how often it is killed.
"""

import os
from collections import Counter
from pathlib import Path
from typing import Final

import pytest
from trainsync.data.cursor import Item

from tests.distributed.data.killed_trainer import EPOCHS, length, surviving, train_over_kills

KILLS: Final = int(os.environ.get("TRAINSYNC_DATA_KILLS", "5"))
LENGTH: Final = length(KILLS)

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(180 + 6 * KILLS)]


def test_no_prompt_is_skipped_and_none_trained_twice_over_real_kills(tmp_path: Path) -> None:
    steps, killed = train_over_kills(tmp_path, KILLS, prompts=LENGTH)
    history = surviving(steps)
    assert killed == KILLS, "the data ended before the last kill"
    assert len(steps) > len(history), "no kill undid a step"
    assert [step.step for step in history] == list(range(1, len(history) + 1))
    trained = [item for step in history for item in step.items]
    assert Counter(trained) == Counter(Item(e, i) for e in range(EPOCHS) for i in range(LENGTH))
    assert history[-1].learned == EPOCHS * LENGTH, "the model learned from what the history says"
