"""The loops of deltas, compiled once in each process, in a thread.

`kernel` has those that find and apply changes, `compact_kernel` those of compact records.
"""

import functools
import importlib.util
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType
from typing import Final

from trainsync.weights.errors import DeltaError

_FORK_SECONDS: Final = 30.0  # more than compiling takes


def prepare(seconds: float = 0.0, *, compact: bool = False) -> bool:
    """Begin to compile what a delta needs, in the background: it takes a second or two of a core.

    A caller that needs the code before that waits for the rest. The code is not kept on the disk:
    pods may have no place to write to.

    Args:
        seconds: to wait for it.
        compact: what compact records need, too.

    Returns:
        Whether it is there.

    Raises:
        DeltaError: numba is not installed or fails, or this process was forked from one that had
            been compiling for long.
    """
    if importlib.util.find_spec("numba") is None:
        raise DeltaError("deltas need numba, which is not installed; expected trainsync[worker]")
    end = time.monotonic() + seconds
    wanted = [_compiling(), _compiling(compact=True)] if compact else [_compiling()]
    there = [one.wait(max(0.0, end - time.monotonic())) for one in wanted]
    return None not in there


def kernel(*, compact: bool = False) -> ModuleType:
    """The loops, which may have to be waited for: `kernel`, or `compact_kernel`.

    Raises:
        DeltaError: see `prepare`.
    """
    return _kernel_of(compact)


@functools.cache
def _kernel_of(compact: bool) -> ModuleType:
    found = _compiling(compact=True).wait() if compact else _compiling().wait()
    if found is None:
        raise RuntimeError("compiling ended without a kernel and without an error")
    return found


class _Compiling:
    """The kernel of this process and of those that it forks: it is compiled once, in a thread.

    A process that is forked meanwhile could not do it: that thread has locks, of LLVM among others,
    which no thread lets go in the child.
    """

    def __init__(self, load: Callable[[], ModuleType]) -> None:
        self._load = load
        self._kernel: ModuleType | None = None
        self._problem: BaseException | None = None
        self._pid = os.getpid()
        # Not a daemon: a process that ends meanwhile would tear LLVM down under it.
        self._thread = threading.Thread(target=self._run, name="trainsync-delta-compile")
        self._thread.start()

    def wait(self, seconds: float | None = None) -> ModuleType | None:
        """The kernel; None when it is not there after ``seconds``.

        Raises:
            DeltaError: see `prepare`.
        """
        if os.getpid() == self._pid and self._thread is not threading.current_thread():
            self._thread.join(seconds)
        if self._problem is not None:
            found = f"{type(self._problem).__name__}: {self._problem}"
            raise DeltaError(f"deltas need numba, which fails here: {found}") from self._problem
        if self._kernel is None and os.getpid() != self._pid:
            raise DeltaError(
                "this process was forked while its parent compiled what deltas need; expected one "
                "that is forked before or after that, or is started anew (spawn)"
            )
        return self._kernel

    def _run(self) -> None:
        try:
            self._kernel = self._load()
        except BaseException as error:  # noqa: BLE001 - raised by `wait`
            self._problem = error


@functools.cache
def _compiling(*, compact: bool = False) -> _Compiling:
    return _Compiling(_import_compact if compact else _import_kernel)


def _before_fork() -> None:
    started = _compiling.cache_info().currsize
    for each in ({}, {"compact": True})[:started]:  # no compact ones are made without the others
        with suppress(DeltaError):  # raised where a delta is needed
            _compiling(**each).wait(_FORK_SECONDS)


os.register_at_fork(before=_before_fork)


def _import_kernel() -> ModuleType:
    """It is compiled when it is imported."""
    from trainsync.weights.delta import kernel

    return kernel


def _import_compact() -> ModuleType:
    from trainsync.weights.delta import compact_kernel

    return compact_kernel
