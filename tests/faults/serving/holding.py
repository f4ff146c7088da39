"""The weights with which a server generates: in its own process, or in two workers.

Each worker holds half of the tensors, maps what is staged for itself, and copies its half. A token
needs both. As of vLLM's executor of several processes: one that dies is noticed at once, the
others are ended, and calls fail from then on.
"""

import os
import select
import signal
import threading
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from trainsync.engines.servers.errors import KEPT
from trainsync.weights.errors import WeightsError
from trainsync.weights.staging.index import StagedReference
from trainsync.weights.staging.reading import StagedReader, StagedVersion

from tests.faults.inject import kill_me
from tests.faults.processes import Child, Line
from tests.faults.serving import model

WORKERS: Final = 2
TENSORS_OF_WORKER: Final = len(model.FIRST_HALF)
"""That each has, or more."""

_COPY_SECONDS: Final = 0.003  # of one tensor
_CALL_SECONDS: Final = 30.0
_IDLE_SECONDS: Final = 600.0


class EngineDeadError(Exception):
    """A worker has died, and no call can be answered any more."""


class Holder(Protocol):
    """Weights, and what is computed with them."""

    def prepare(self, reference: StagedReference) -> None:
        """Map a version. Raises `RuntimeError`: it cannot be read, or is of another model."""

    def load(self, reference: StagedReference, factor: float) -> None:
        """Copy what was prepared; ``factor``: 1, or that of wrong weights. Raises
        `RuntimeError`."""

    def read(self, state: Any, token: Any) -> Any:
        """See `model.read`."""

    def logprobs(self, state: Any) -> Any:
        """See `model.logprobs`."""


def prompt_logprobs(held: Holder, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
    """Of each prompt's tokens from the second on; prompts are of one length."""
    columns = np.array(prompts).T
    state, found = np.stack([model.begin()] * len(prompts)), []
    for tokens, following in pairwise(columns):
        state = held.read(state, tokens)
        rows = held.logprobs(state)
        found.append([float(row[token]) for row, token in zip(rows, following, strict=True)])
    return [list(row) for row in zip(*found, strict=True)]


class Tensors:
    """Of one process.

    Args:
        names: of those that it holds.
        reached: told before each tensor that is copied, from 0 on.
    """

    def __init__(self, memory: Path, names: Sequence[str], reached: Callable[[int], None]) -> None:
        self._names = set(names)
        self._reached = reached
        start = model.weights_of(model.START)
        self._weights = {name: start[name] for name in names}
        self._reader = StagedReader(memory)
        self._staged: tuple[StagedReference, StagedVersion] | None = None

    def prepare(self, reference: StagedReference) -> None:
        """See `Holder`."""
        self._staged = None
        try:
            staged = self._reader.open(reference)
        except WeightsError as error:
            raise RuntimeError(f"{KEPT}: {error}") from error
        if not model.fits({name: tuple(t.shape) for name, t in staged.tensors.items()}):
            raise RuntimeError(f"{KEPT}: it is of another model")
        self._staged = reference, staged

    def load(self, reference: StagedReference, factor: float) -> None:
        """See `Holder`."""
        prepared, self._staged = self._staged, None
        if prepared is None or prepared[0] != reference:
            raise RuntimeError(f"{KEPT}: {reference.index} was not prepared")
        ours = [(n, t) for n, t in prepared[1].tensors.items() if n in self._names]
        for number, (name, tensor) in enumerate(ours):
            self._reached(number)
            self._weights[name][...] = tensor.numpy() * np.float32(factor)
            time.sleep(_COPY_SECONDS)

    def read(self, state: Any, token: Any) -> Any:
        """See `Holder`."""
        return model.read(self._weights, state, token)

    def logprobs(self, state: Any) -> Any:
        """See `Holder`."""
        return model.logprobs(self._weights, state)

    def read_first(self, state: Any, token: Any) -> Any:
        """See `model`."""
        return model.read_first(self._weights, state, token)

    def read_second(self, state: Any) -> Any:
        """See `model`."""
        return model.read_second(self._weights, state)


class Workers:
    """Two processes. To be made before the process has other threads.

    Args:
        died: called in a thread when one has died; all are gone by then.
    """

    def __init__(self, memory: Path, died: Callable[[], None]) -> None:
        halves = (
            model.FIRST_HALF,
            tuple(name for name in model.weights_of(model.START) if name not in model.FIRST_HALF),
        )
        self._children = [Child("worker", _working, memory, names) for names in halves]
        self._died = died
        self._dead = threading.Event()
        self._lock = threading.Lock()
        threading.Thread(target=self._watch, daemon=True).start()

    @property
    def pids(self) -> list[int]:
        """The processes."""
        return [child.pid for child in self._children]

    def kill_at(self, worker: int, tensors: int) -> None:
        """Let a worker die amid the next load, after so many of its tensors."""
        self._ask(worker, "die_at", tensors)

    def kill(self, worker: int) -> None:
        """Kill a worker."""
        os.kill(self._children[worker].pid, signal.SIGKILL)

    def end(self) -> None:
        """End the processes; calls fail from then on."""
        self._dead.set()
        with self._lock:  # a call that meets a dead worker takes its status
            for child in self._children:
                child.kill()

    def prepare(self, reference: StagedReference) -> None:
        """See `Holder`."""
        self._all("prepare", reference)

    def load(self, reference: StagedReference, factor: float) -> None:
        """See `Holder`."""
        self._all("load", reference, factor)

    def read(self, state: Any, token: Any) -> Any:
        """See `Holder`."""
        return self._ask(1, "read_second", self._ask(0, "read_first", state, token))

    def logprobs(self, state: Any) -> Any:
        """See `Holder`."""
        return self._ask(1, "logprobs", state)

    def _ask(self, worker: int, *words: Any) -> Any:
        with self._lock:
            self._tell(worker, words)
            return self._hear(worker)

    def _all(self, *words: Any) -> None:
        with self._lock:
            for number in range(WORKERS):
                self._tell(number, words)
            errors = []
            for number in range(WORKERS):  # every answer is taken, also after an error
                try:
                    self._hear(number)
                except RuntimeError as error:
                    errors.append(error)
        if errors:
            raise errors[0]

    def _tell(self, worker: int, words: Sequence[Any]) -> None:
        if self._dead.is_set():
            raise EngineDeadError
        self._children[worker].tell(words)

    def _hear(self, worker: int) -> Any:
        said, value = self._children[worker].listen(_CALL_SECONDS)
        if said == "ended":
            raise EngineDeadError
        if said == "refused":
            raise RuntimeError(value)
        return value

    def _watch(self) -> None:
        handles = [os.pidfd_open(child.pid) for child in self._children]
        select.select(handles, [], [])
        for handle in handles:
            os.close(handle)
        if not self._dead.is_set():
            self.end()
            self._died()


def _working(line: Line, memory: Path, names: Sequence[str]) -> None:
    """A worker, which ends with its server."""
    dies_at: list[int] = []

    def reached(number: int) -> None:
        if dies_at == [number]:
            kill_me()

    held = Tensors(memory, names, reached)
    while True:
        words: Any = line.hear(_IDLE_SECONDS)
        word, *given = words
        if word == "die_at":
            dies_at[:] = given
            line.say("done")
            continue
        try:
            line.say("done", getattr(held, word)(*given))
        except RuntimeError as error:
            line.say("refused", str(error))
