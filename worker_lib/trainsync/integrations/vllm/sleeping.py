"""vLLM's sleep, told to workers and to drivers.

A vLLM that sleeps frees the memory of its weights, at level 2 for good. vLLM 0.32 keeps the
weights' name all the same, also when it wakes up; its ``is_sleeping`` is true of a server that is
only paused, too; and a load, or a resumption, that comes meanwhile meets memory that is not there.
"""

from functools import wraps
from typing import Any, Final

from trainsync.engines.servers.tags import ASLEEP, DISCARDED

NOTE_SLEEP: Final = "trainsync_note_sleep"
"""The method of vLLM's workers that is told when they fall asleep, and when they wake up."""

_FOR_GOOD: Final = 2  # from this level on, weights are not kept in the host's memory
_WEIGHTS: Final = "weights"  # vLLM's name for their memory
_DISCARDED: Final = "trainsync_discarded"


def note_sleep(core: Any, executor: Any, backend: str) -> None:
    """Let engines of this process tell of their sleep; a second time changes nothing.

    The weights are called `ASLEEP` while any memory sleeps, and `DISCARDED` when they wake up from
    level 2. To resume a sleeper does nothing: vLLM resumes it when it is awake.

    Args:
        core: vLLM's class ``EngineCore``.
        executor: vLLM's class ``Executor``.
        backend: of ``--weight-transfer-config``; workers of others are told nothing.
    """
    if hasattr(executor, _DISCARDED):
        return
    setattr(executor, _DISCARDED, False)
    _note_in_executor(executor, backend)
    _note_in_core(core)


def _note_in_executor(executor: Any, backend: str) -> None:
    sleep, wake_up = executor.sleep, executor.wake_up

    def tell(self: Any, *, asleep: bool) -> None:
        config = self.vllm_config.weight_transfer_config
        if config is not None and config.backend == backend:
            self.collective_rpc(NOTE_SLEEP, args=(asleep,))

    @wraps(sleep)
    def sleep_and_tell(self: Any, level: int = 1) -> None:
        if _WEIGHTS not in self.sleeping_tags:  # else vLLM does nothing
            tell(self, asleep=True)
            if level >= _FOR_GOOD:
                setattr(self, _DISCARDED, True)
        sleep(self, level)

    @wraps(wake_up)
    def wake_up_and_tell(self: Any, tags: list[str] | None = None) -> None:
        slept = _WEIGHTS in self.sleeping_tags
        wake_up(self, tags)
        if slept and _WEIGHTS not in self.sleeping_tags:
            tell(self, asleep=False)

    executor.sleep, executor.wake_up = sleep_and_tell, wake_up_and_tell


def _note_in_core(core: Any) -> None:
    wake_up, name, resume = core.wake_up, core.get_weight_version, core.resume_scheduler

    @wraps(wake_up)
    def wake_up_renamed(self: Any, tags: list[str] | None = None) -> Any:
        executor = self.model_executor
        if getattr(executor, _DISCARDED):
            self.set_weight_version(DISCARDED)  # before a request goes on
            setattr(executor, _DISCARDED, False)
        return wake_up(self, tags)

    @wraps(name)
    def name_now(self: Any) -> Any:
        return ASLEEP if self.model_executor.is_sleeping else name(self)

    @wraps(resume)
    def resume_if_awake(self: Any) -> None:
        if not self.model_executor.is_sleeping:
            resume(self)

    core.wake_up, core.get_weight_version = wake_up_renamed, name_now
    core.resume_scheduler = resume_if_awake
