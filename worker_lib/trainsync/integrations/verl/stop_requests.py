"""Lets verl's trainer save when its run is suspended or preempted, and train no further.

verl decides when to save in its trainer, which saves nothing itself and has not claimed the
attempt; its workers save, and tell the monitor the step (`RunContext.answer_stop`). So the trainer
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
_AWAY_SECONDS: Final = 60.0  # a monitor that dies is made again
_SAVED: Final = "_trainsync_saved_step"


def state() -> str:
    """The monitor's word: wait (a save is waited for), go (it is committed), unknown (nothing is
    asked for), or away, where it does not answer."""
    url, token = os.environ.get(env.MONITOR_URL), os.environ.get(env.TOKEN_FILE)
    if url is None:
        return "unknown"
    try:
        return hook.ask(url, Path(token) if token else None, refused="unknown")
    except (OSError, ValueError, KeyError) as error:
        logger.debug("the monitor was not asked for requests to save: %s", error)
        return "away"


def hold() -> None:
    """After a save: return when no save is waited for, or the monitor stays away; mostly the
    process ends here."""
    heard = time.monotonic()
    end = heard + _LONGEST_SECONDS
    while (word := state()) != "unknown" and (now := time.monotonic()) < end:
        if word != "away":
            heard = now
        elif now - heard >= _AWAY_SECONDS:
            logger.warning("the monitor is away: training goes on, whether a save is asked or not")
            return
        time.sleep(_POLL_SECONDS)


def saved(trainer: Any, asked: bool) -> None:
    """The trainer has saved its present step; ``asked``: for a request from before that save.

    A request that came amid the save was not answered with it: the next step answers.
    """
    setattr(trainer, _SAVED, trainer.global_steps)
    if asked:
        hold()


def listen(trainer: Any) -> None:
    """Let this trainer save where that is asked for: before ``on_step_end``, as verl does, since
    that gives the GPUs' memory to the rollouts. Of the object, as each class has one of its own."""
    verls = getattr(trainer, "on_step_end", None)
    if verls is not None and not hasattr(verls, "verls"):
        trainer.on_step_end = after_each_step(trainer, verls)


def after_each_step(trainer: Any, on_step_end: Callable[[], None]) -> Callable[[], None]:
    """``on_step_end`` of ``trainer`` after a save where one is asked for."""

    @functools.wraps(on_step_end)
    def saving_when_asked() -> None:
        # What was saved in this step was before the request: the next step answers.
        saves = trainer.config.trainer.save_freq > 0
        if saves and getattr(trainer, _SAVED, None) != trainer.global_steps and state() == "wait":
            trainer._save_checkpoint()
        on_step_end()

    saving_when_asked.verls = on_step_end  # type: ignore[attr-defined]
    return saving_when_asked


def or_asked(should_save: Callable[..., bool]) -> Callable[..., bool]:
    """``should_save_ckpt_esi`` of the older trainer, which it calls before it decides to save."""

    @functools.wraps(should_save)
    def should_save_or_asked(*args: Any, **kwargs: Any) -> bool:
        return should_save(*args, **kwargs) or state() == "wait"

    should_save_or_asked.verls = should_save  # type: ignore[attr-defined]
    return should_save_or_asked
