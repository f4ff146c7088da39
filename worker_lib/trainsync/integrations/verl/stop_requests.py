"""Lets verl's trainer save when its run is suspended or preempted, and train no further.

verl decides when to save in its trainer, which saves nothing itself and has not claimed the
attempt; its workers save, and tell the monitor the step (`Stopping.answer_stop`). So the trainer
asks what a pod asks that is told to end: whether a save is waited for.
"""

import functools
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from trainsync.api import env
from trainsync.runtime.stop import hook

logger = logging.getLogger(__name__)

_POLL_SECONDS: Final = 1.0
_LONGEST_SECONDS: Final = 3700.0  # a little more than the longest deadline
_SAVED: Final = "_trainsync_saved_step"


def state() -> str:
    """The monitor's word: wait (a save is waited for), go (it is committed), or unknown."""
    url, token = os.environ.get(env.MONITOR_URL), os.environ.get(env.TOKEN_FILE)
    if url is None:
        return "unknown"
    try:
        return hook.ask(url, Path(token) if token else None, refused="unknown")
    except (OSError, ValueError, KeyError) as error:
        logger.debug("the monitor was not asked for requests to save: %s", error)
        return "unknown"


def hold() -> None:
    """After a save: return when no save is waited for; mostly the process ends here."""
    end = time.monotonic() + _LONGEST_SECONDS
    while state() != "unknown" and time.monotonic() < end:
        time.sleep(_POLL_SECONDS)


def saved(trainer: Any) -> None:
    """The trainer has saved its present step."""
    setattr(trainer, _SAVED, trainer.global_steps)
    hold()


def after_each_step(on_step_end: Callable[[Any], None]) -> Callable[[Any], None]:
    """``PPOTrainer.on_step_end`` with a save where one is asked for."""

    @functools.wraps(on_step_end)
    def saving_when_asked(self: Any) -> None:
        on_step_end(self)
        # What was saved in this step was before the request: the next step answers.
        if self.config.trainer.save_freq <= 0 or getattr(self, _SAVED, None) == self.global_steps:
            return
        if state() == "wait":
            self._save_checkpoint()

    saving_when_asked.verls = on_step_end  # type: ignore[attr-defined]
    return saving_when_asked


def or_asked(should_save: Callable[..., bool]) -> Callable[..., bool]:
    """``should_save_ckpt_esi`` of the older trainer, which it calls before it decides to save."""

    @functools.wraps(should_save)
    def should_save_or_asked(*args: Any, **kwargs: Any) -> bool:
        return should_save(*args, **kwargs) or state() == "wait"

    should_save_or_asked.verls = should_save  # type: ignore[attr-defined]
    return should_save_or_asked
