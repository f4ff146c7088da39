"""Daemon threads that call Ray, and that end before Ray does when the process exits.

A thread inside a call of Ray while Ray is torn down can crash the process.
"""

import atexit
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import ray  # before `atexit` below: what is registered last runs first

_EXIT_SECONDS = 3.0
_LOOK_SECONDS = 0.2


class StopSignal(Protocol):
    """Signals a thread to return, such as a `threading.Event`."""

    def set(self) -> None:
        """Return soon."""
        ...


_running: "weakref.WeakKeyDictionary[threading.Thread, StopSignal]" = weakref.WeakKeyDictionary()


def start(
    name: str, target: Callable[..., None], ending: StopSignal, *arguments: Any
) -> threading.Thread:
    """Start ``target``, which is to return soon after ``ending`` is set."""
    thread = threading.Thread(target=target, args=arguments, name=name, daemon=True)
    _running[thread] = ending
    thread.start()
    return thread


def ray_is_there() -> bool:
    """Whether this process may still call Ray; a call after its shutdown would start another."""
    return bool(ray.is_initialized())


def answer(reference: Any, give_up: Callable[[], bool]) -> Any | None:
    """The answer of a call to an actor; None when ``give_up()`` is true first."""
    done: list[Any] = []
    while not done and not give_up():
        done, _ = ray.wait([reference], timeout=_LOOK_SECONDS)
    return ray.get(reference) if done else None


class _RayCalls:
    """Calls of Ray by threads that were started elsewhere."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._going_on = 0
        self._over = False

    def begin(self) -> bool:
        with self._changed:
            if self._over or not ray_is_there():
                return False
            self._going_on += 1
            return True

    def end(self) -> None:
        with self._changed:
            self._going_on -= 1
            self._changed.notify_all()

    def close(self, seconds: float) -> None:
        with self._changed:
            self._over = True
            self._changed.wait_for(lambda: not self._going_on, seconds)


_calls = _RayCalls()


@contextmanager
def calling_ray() -> Iterator[bool]:
    """Around a short call of Ray in a thread that `start` did not start.

    Gives False when Ray is not to be called any more.
    """
    allowed = _calls.begin()
    try:
        yield allowed
    finally:
        if allowed:
            _calls.end()


@atexit.register
def _end_all() -> None:
    threads = [thread for thread in _running if thread.is_alive()]
    for thread in threads:
        _running[thread].set()
    deadline = time.monotonic() + _EXIT_SECONDS
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    _calls.close(max(0.0, deadline - time.monotonic()))
