"""Calls to a Synchronizer that may be rebuilt meanwhile, each with a deadline."""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

import ray

from trainsync.weights import threads
from trainsync.weights.errors import WeightsUnavailableError
from trainsync.weights.synchronizer.ray_errors import one_sentence, raised_there
from trainsync.weights.synchronizer.replicated_state import Contact

ACTOR_NAME: Final = "trainsync-synchronizer"

# Longer than it takes to notice that the actor died and to start another process.
_REBUILD_SECONDS = 60.0
_LOOK_SECONDS = 0.1


def find_actor(namespace: str, timeout: float = 60.0) -> Any:
    """The handle of the namespace's Synchronizer.

    Raises:
        WeightsUnavailableError: there was none within ``timeout`` seconds.
    """
    deadline = time.monotonic() + timeout
    while True:
        try:
            return ray.get_actor(ACTOR_NAME, namespace=namespace)
        except ValueError as error:
            if time.monotonic() >= deadline:
                raise WeightsUnavailableError(
                    f"no Synchronizer in Ray namespace {namespace!r} after {timeout:g} s; "
                    "the job's driver makes it with RunContext.synchronizer()"
                ) from error
            time.sleep(_LOOK_SECONDS)


class Connection:
    """One process's way to the Synchronizer of a Ray namespace. Any thread may use it.

    When an actor dies that is kept, a call waits for the one that replaces it, for up to a minute,
    and is made again there; otherwise it fails at once.

    Args:
        synchronizer: actor handle, from `Synchronizer.get_actor` or `RunContext.synchronizer`.
        timeout: seconds for the first answer.
    """

    def __init__(self, synchronizer: Any, timeout: float) -> None:
        self._handle = synchronizer
        self._lock = threading.Lock()  # guards the handle
        self.rebuilds = 0
        try:
            self.contact: Contact = ray.get(synchronizer.get_contact.remote(), timeout=timeout)
        except ray.exceptions.GetTimeoutError:
            raise _silent("get_contact", timeout) from None
        except ray.exceptions.RayActorError as error:
            raise _gone(error) from None

    def call(
        self,
        method: str,
        *arguments: Any,
        timeout: float,
        when_repeated: Mapping[str, Any] | None = None,
        give_up: Callable[[], bool] | None = None,
    ) -> Any:
        """The answer of one method of the actor.

        Args:
            timeout: seconds for everything.
            when_repeated: more arguments, of a call that may have been taken before.
            give_up: asked five times a second; the answer is None once it is true.

        Raises:
            WeightsUnavailableError: no answer in time, or the actor is gone for good.
            What the method raises.
        """
        deadline = time.monotonic() + timeout
        gone_since: float | None = None
        while True:
            handle = self._handle
            more = when_repeated if gone_since is not None and when_repeated is not None else {}
            try:
                reference = getattr(handle, method).remote(*arguments, **more)
                if give_up is None:
                    return ray.get(reference, timeout=max(0.0, deadline - time.monotonic()))
                return _answer(reference, deadline, give_up)
            except ray.exceptions.GetTimeoutError:
                raise _silent(method, timeout) from None
            except ray.exceptions.RayTaskError as error:
                raised = raised_there(error)
                raise raised from raised.__cause__
            except ray.exceptions.RayActorError as error:
                if not self.contact.kept:
                    raise _gone(error) from None
                gone_since = gone_since or time.monotonic()
                self._look(handle, min(deadline, gone_since + _REBUILD_SECONDS), error)

    def _look(self, dead: Any, deadline: float, error: Exception) -> None:
        """Find the actor again. It may be the same: Ray also says that one cannot be reached."""
        if time.monotonic() + _LOOK_SECONDS > deadline:
            raise _gone(error) from None
        time.sleep(_LOOK_SECONDS)
        try:
            found = ray.get_actor(ACTOR_NAME, namespace=self.contact.namespace)
        except ValueError:
            return  # not rebuilt yet; the caller asks the dead one, and comes back
        with self._lock:
            if self._handle is dead and found._actor_id != dead._actor_id:
                self._handle = found
                self.rebuilds += 1


def _answer(reference: Any, deadline: float, give_up: Callable[[], bool]) -> Any:
    """The answer, or None; raises as `ray.get` does at the deadline."""
    if time.monotonic() >= deadline:
        return ray.get(reference, timeout=0.0)
    over = threads.answer(reference, lambda: give_up() or time.monotonic() >= deadline)
    if over is None and not give_up():
        return ray.get(reference, timeout=0.0)
    return over


def _silent(method: str, seconds: float) -> WeightsUnavailableError:
    return WeightsUnavailableError(f"the Synchronizer did not answer {method} within {seconds:g} s")


def _gone(error: Exception) -> WeightsUnavailableError:
    return WeightsUnavailableError(f"the Synchronizer is gone: {one_sentence(error)}")
