"""A thread of a worker that prepares one version while the worker serves."""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Final

import torch

from trainsync.engines.errors import EngineUpdateError
from trainsync.engines.servers.errors import KEPT
from trainsync.engines.servers.preparing import PreparationOutcome
from trainsync.integrations.vllm.errors import AbandonedError, NoRoomError, UnpreparableError
from trainsync.integrations.vllm.replacement import Replacement

_LOG: Final = logging.getLogger("vllm.trainsync")  # vLLM shows no others
_NICENESS: Final = 10
_SLICE_SECONDS: Final = 0.01  # for which a step of the server waits
_STOP_SECONDS: Final = 60.0  # for the layer that is in work
_REASONS: Final[tuple[tuple[type[Exception], PreparationOutcome], ...]] = (
    (UnpreparableError, PreparationOutcome.IMPOSSIBLE),
    (NoRoomError, PreparationOutcome.NO_MEMORY),
    (MemoryError, PreparationOutcome.NO_MEMORY),
)


class PreparedVersion:
    """The weights of a version beside those that serve.

    Args:
        comparing: compares them with the staged ones, in pieces, which may raise.
        free: lets go of memory that only the comparison needs.

    Attributes:
        replacement: of the weights that serve.
    """

    def __init__(
        self, replacement: Replacement, comparing: Iterator[None], free: Callable[[], None]
    ) -> None:
        self.replacement = replacement
        self._comparing = comparing
        self._free = free

    def compare(self, seconds: float) -> bool:
        """Compare for ``seconds``, or one piece; whether that was the last. Raises as comparing."""
        deadline = time.monotonic() + seconds
        return all(time.monotonic() < deadline for _ in self._comparing)

    def close(self) -> None:
        """Let go of all but the replacement."""
        self._comparing = iter(())
        self._free()


class PreparingThread:
    """Prepares at once. Calls from one other thread, that which serves.

    That thread compares the layers: kernels share a scratch pad of their process, so that no two
    threads may compute with them (vLLM's csrc/cpu/dnnl_helper.cpp). To pack weights takes none.

    Args:
        prepare: the work; calls its argument now and then, which may raise.
        name: of the version, for logs.
        seconds: for which prepared weights are kept.

    Raises:
        EngineUpdateError: nothing can be kept for so long.
    """

    def __init__(
        self, prepare: Callable[[Callable[[], None]], PreparedVersion], name: str, seconds: float
    ) -> None:
        if not 0 < seconds <= threading.TIMEOUT_MAX:
            raise EngineUpdateError(f"{KEPT}: {name} cannot be kept for {seconds} s")
        self._prepare = prepare
        self._name = name
        self._seconds = seconds
        self._lock = threading.Lock()
        self._version: PreparedVersion | None = None
        self._outcome: PreparationOutcome | None = None
        self._reason = ""
        self._unwanted = threading.Event()
        self._thread = threading.Thread(target=self._run, name="trainsync-prepare", daemon=True)
        self._thread.start()

    def ask(self) -> tuple[PreparationOutcome | None, str]:
        """The outcome, None before the end, with its reason. Compares layers, for milliseconds."""
        with self._lock:
            if self._outcome is None and self._version is not None:
                try:
                    if self._version.compare(_SLICE_SECONDS):
                        self._version.close()
                        self._outcome = PreparationOutcome.PREPARED
                except Exception as error:  # noqa: BLE001 - told, and the server serves on
                    self._drop(PreparationOutcome.FAILED, str(error) or type(error).__name__)
            return self._outcome, self._reason

    def take(self) -> PreparedVersion | None:
        """The prepared weights, which are the caller's from now on; None: there are none.

        Raises as `abandon` does.
        """
        found = None
        with self._lock:
            if self._outcome is PreparationOutcome.PREPARED:
                found, self._version = self._version, None
        self.abandon()
        return found

    def abandon(self) -> None:
        """End the preparation, and let go of its memory.

        Raises:
            EngineUpdateError: the preparation does not end. Other workers may have the version by
                then.
        """
        self._unwanted.set()
        self._thread.join(_STOP_SECONDS)
        if self._thread.is_alive():
            raise EngineUpdateError(
                f"the preparation of {self._name} did not end within {_STOP_SECONDS:.0f} s"
            )

    def _run(self) -> None:
        try:
            _step_back()
            version = self._prepare(self._go_on)
        except AbandonedError:
            self._end(PreparationOutcome.LATE, "it was given up")
            return
        except Exception as error:  # noqa: BLE001 - told, and the server serves on
            outcome = next((o for kind, o in _REASONS if isinstance(error, kind)), None)
            if outcome is None:
                _LOG.exception("%s could not be prepared", self._name)
            else:
                _LOG.warning("%s is not prepared: %s", self._name, error)
            self._end(outcome or PreparationOutcome.FAILED, str(error) or type(error).__name__)
            return
        with self._lock:
            self._version = version
        del version
        given_up = self._unwanted.wait(self._seconds)
        with self._lock:
            if self._version is not None:
                late = f"no update took it within {self._seconds:.0f} s"
                self._drop(PreparationOutcome.LATE, "it was given up" if given_up else late)

    def _go_on(self) -> None:
        if self._unwanted.is_set():
            raise AbandonedError

    def _drop(self, outcome: PreparationOutcome, reason: str) -> None:
        """Let go of the version; the caller has the lock."""
        assert self._version is not None
        self._version.close()
        self._version = None
        self._outcome, self._reason = outcome, reason

    def _end(self, outcome: PreparationOutcome, reason: str) -> None:
        with self._lock:
            self._outcome, self._reason = outcome, reason


def _step_back() -> None:
    """Give way to the threads that serve: by priority, by place, by number.

    vLLM binds its workers to cores, which this thread inherits, and leaves others to the process
    that started the worker.
    """
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
    with suppress(OSError):
        serving = os.sched_getaffinity(os.getpid())
        others = os.sched_getaffinity(os.getppid()) - serving
        if others:
            os.sched_setaffinity(0, others)
    torch._C.set_num_threads(1)  # of this thread; vLLM replaces the one that torch shows
