"""vLLM's sleep, told to workers and to drivers.

A vLLM that sleeps frees the memory of its weights, at level 2 for good. vLLM 0.32 keeps the
weights' name all the same, also after waking up, and goes on with requests at once. Its
``is_sleeping`` is true of a server that is only paused, too. A load, or a resumption, during the
sleep meets memory that is not there.
"""

from collections.abc import Iterator
from contextlib import suppress
from functools import wraps
from typing import Any, Final

from trainsync.api.protocol import ASLEEP
from trainsync.engines.servers.tags import DISCARDED

NOTE_SLEEP: Final = "trainsync_note_sleep"
"""The method of vLLM's workers that is told when they are about to sleep, and when they are awake.
Its answer: whether the weights are of one version."""

_FOR_GOOD: Final = 2  # from this level on, weights are not kept in the host's memory
_WEIGHTS: Final = "weights"  # vLLM's names of the memory that sleeps
_ALL: Final = frozenset({_WEIGHTS, "kv_cache"})
_SCHEDULING: Final = "scheduling"
_OF_EXECUTOR: Final = ("sleep", "wake_up", "is_sleeping", "collective_rpc")
_OF_CORE: Final = (
    "sleep",
    "wake_up",
    "resume_scheduler",
    "get_weight_version",
    "set_weight_version",
)


def note_sleep(core: Any, executor: Any, backend: str) -> bool:
    """Let engines of this process tell of their sleep; a second time changes nothing.

    From the call to sleep until all memory is awake the weights are called `ASLEEP`, and nothing
    resumes the scheduler. Weights that were discarded, or were of two versions when they fell
    asleep, are called `DISCARDED` from then on, and the scheduler stays paused until they have
    another name, or a call resumes the scheduler.

    Args:
        core: vLLM's class ``EngineCore``.
        executor: vLLM's class ``Executor``.
        backend: of ``--weight-transfer-config``; engines with another one stay as they are.

    Returns:
        whether vLLM has the methods that this needs; else nothing is changed.
    """
    if hasattr(executor, "trainsync_discarded"):
        return True
    has_all = all(hasattr(executor, name) for name in _OF_EXECUTOR)
    if not has_all or not all(hasattr(core, name) for name in _OF_CORE):
        return False
    executor.trainsync_discarded = False
    core.trainsync_falls_asleep = core.trainsync_wakes_up = core.trainsync_held = False

    def ours(self: Any) -> bool:
        config = self.vllm_config.weight_transfer_config
        return config is not None and config.backend == backend

    _note_in_executor(executor, ours)
    _note_in_core(core, ours)
    return True


def _note_in_executor(executor: Any, ours: Any) -> None:
    sleep, wake_up = executor.sleep, executor.wake_up

    @wraps(sleep)
    def sleep_and_tell(self: Any, level: int = 1) -> None:
        if not ours(self) or _WEIGHTS in self.sleeping_tags:  # else vLLM does nothing
            sleep(self, level)
            return
        try:
            whole = all(self.collective_rpc(NOTE_SLEEP, args=(True,)))
        except BaseException:
            with suppress(Exception):  # the first error is the one to tell
                self.collective_rpc(NOTE_SLEEP, args=(False,))
            raise
        if level >= _FOR_GOOD or not whole:
            self.trainsync_discarded = True
        try:
            sleep(self, level)
        except BaseException:
            # Some memory may be gone: only to wake up brings it back.
            self.sleeping_tags |= _ALL
            raise

    @wraps(wake_up)
    def wake_up_and_tell(self: Any, tags: list[str] | None = None) -> None:
        wake_up(self, tags)
        if ours(self) and _WEIGHTS not in self.sleeping_tags:
            self.collective_rpc(NOTE_SLEEP, args=(False,))

    executor.sleep, executor.wake_up = sleep_and_tell, wake_up_and_tell


def _note_in_core(core: Any, ours: Any) -> None:
    sleep, wake_up = core.sleep, core.wake_up
    get_name, set_name = core.get_weight_version, core.set_weight_version

    @wraps(sleep)
    def sleep_by_name(self: Any, level: int = 1, *arguments: Any, **named: Any) -> Any:
        if level < 1 or not ours(self.model_executor):
            return sleep(self, level, *arguments, **named)

        def asleep(_: Any = None) -> None:
            self.trainsync_falls_asleep = False

        self.trainsync_falls_asleep = True  # vLLM may wait for requests first
        future = None
        try:
            future = sleep(self, level, *arguments, **named)
        finally:
            if future is None:
                asleep()
        if future is not None:
            future.add_done_callback(asleep)
        return future

    @wraps(wake_up)
    def wake_up_renamed(self: Any, tags: list[str] | None = None) -> Any:
        executor = self.model_executor
        if executor.trainsync_discarded:
            set_name(self, DISCARDED)
            executor.trainsync_discarded = False
        self.trainsync_wakes_up = _SCHEDULING not in (tags or ())
        try:
            return wake_up(self, tags)
        finally:
            self.trainsync_wakes_up = False

    @wraps(get_name)
    def get_name_now(self: Any) -> Any:
        executor = self.model_executor
        asleep = self.trainsync_falls_asleep or executor.is_sleeping
        return ASLEEP if asleep and ours(executor) else get_name(self)

    @wraps(set_name)
    def set_name_and_go_on(self: Any, name: str) -> None:
        set_name(self, name)
        if self.trainsync_held and name != DISCARDED and not self.model_executor.is_sleeping:
            self.resume_scheduler()

    core.sleep, core.wake_up = sleep_by_name, wake_up_renamed
    core.get_weight_version, core.set_weight_version = get_name_now, set_name_and_go_on
    for kind in _with_own(core, "resume_scheduler"):
        kind.resume_scheduler = _resuming_if_awake(kind.resume_scheduler, get_name, ours)


def _resuming_if_awake(resume: Any, get_name: Any, ours: Any) -> Any:
    @wraps(resume)
    def resume_if_awake(self: Any) -> None:
        if ours(self.model_executor):
            if self.model_executor.is_sleeping:
                return
            self.trainsync_held = self.trainsync_wakes_up and get_name(self) == DISCARDED
            if self.trainsync_held:
                return
        resume(self)

    return resume_if_awake


def _with_own(kind: Any, method: str) -> Iterator[Any]:
    """A class and those made from it that define a method themselves."""
    if method in vars(kind):
        yield kind
    for made in kind.__subclasses__():
        yield from _with_own(made, method)
