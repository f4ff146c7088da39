"""Runs trials in worker processes that are forked once and fork again for each trial.

Importing torch takes seconds; forking a process that has imported torch takes milliseconds.
"""

import contextlib
import logging
import os
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Final

import torch

from tests.faults.processes import BrokenError, die_with_parent
from tests.faults.scenario import Scenario
from tests.faults.trial import Trial
from tests.forking import prepare_for_forks

TRIAL_SECONDS: Final = 240.0
"""A trial that takes longer counts as hung and broken."""


@dataclass(frozen=True)
class Result:
    """Result of one trial: ``broken`` names the broken promise and the folder of its files."""

    name: str
    seed: int
    point: str
    seconds: float
    broken: str | None = None
    kept: str | None = None
    notes: frozenset[str] = frozenset()


def run_trial(scenario: Scenario, seed: int, base: Path, kept: Path) -> Result:
    """One trial in its own directory below ``base``, moved to ``kept`` after a broken promise."""
    directory = Path(tempfile.mkdtemp(prefix=f"{scenario.name}-", dir=base))
    directory.chmod(0o755)
    started = time.monotonic()
    broken = None
    trial = Trial(seed, directory, scenario.point(seed))
    log = logging.FileHandler(directory / "log.txt")
    log.setFormatter(logging.Formatter("%(asctime)s %(process)d %(name)s: %(message)s"))
    root = logging.getLogger()
    root.handlers, root.level = [log], logging.INFO
    try:
        with trial:
            scenario.trial(trial)
    except BrokenError as error:
        broken = str(error)
    except Exception:  # noqa: BLE001 - shown, and counted as broken
        broken = traceback.format_exc()
    root.handlers = []
    log.close()
    place = None
    if broken is not None:
        place = kept / f"{scenario.name}-{seed}"
        shutil.rmtree(place, ignore_errors=True)
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(directory, place, symlinks=True, ignore_dangling_symlinks=True)
        (place / "broken.txt").write_text(f"{scenario.name} at {trial.point}\n{broken}\n")
    trial.remove()
    return Result(
        scenario.name,
        seed,
        trial.point,
        time.monotonic() - started,
        broken,
        None if place is None else str(place),
        frozenset(trial.notes),
    )


def run_all(
    todo: Iterable[tuple[Scenario, int]], *, jobs: int, base: Path, kept: Path
) -> Iterator[Result]:
    """Results of all trials as they end, ``jobs`` at a time. Call from a single-threaded process.

    A hung trial is killed with its worker, and a new worker takes its place.
    """
    queue = iter(todo)
    prepare_for_forks()
    torch.set_num_threads(1)
    workers = [_Worker(base, kept) for _ in range(jobs)]
    busy: dict[Connection, _Worker] = {}
    try:
        for worker in workers:
            _next(worker, queue, busy)
        while busy:
            ready = wait(list(busy), timeout=1.0)
            for connection in ready:
                assert isinstance(connection, Connection)
                worker = busy.pop(connection)
                yield worker.result()
                _next(worker, queue, busy)
            for connection, worker in list(busy.items()):
                if worker.late:
                    del busy[connection]
                    yield worker.give_up()
                    _next(worker, queue, busy)
    finally:
        for worker in workers:
            worker.kill()


def _next(
    worker: "_Worker",
    queue: Iterator[tuple[Scenario, int]],
    busy: dict[Connection, "_Worker"],
) -> None:
    for scenario, seed in queue:
        busy[worker.start(scenario, seed)] = worker
        return


class _Worker:
    """A process that runs trials one after another."""

    def __init__(self, base: Path, kept: Path) -> None:
        self._base = base
        self._kept = kept
        self._trial: tuple[Scenario, int] | None = None
        self._started = 0.0
        self._fork()

    def start(self, scenario: Scenario, seed: int) -> Connection:
        """Begin a trial; the returned object becomes readable when the trial ends."""
        self._trial = (scenario, seed)
        self._started = time.monotonic()
        self._connection.send((scenario, seed))
        return self._connection

    def result(self) -> Result:
        """Result of the ended trial, which may have killed the worker."""
        assert self._trial is not None
        try:
            found: Result = self._connection.recv()
        except (EOFError, ConnectionResetError):
            return self._lost("the process that conducts the trial died")
        return found

    @property
    def late(self) -> bool:
        """Whether the trial has run longer than `TRIAL_SECONDS`."""
        return time.monotonic() - self._started > TRIAL_SECONDS

    def give_up(self) -> Result:
        """Kill the worker and all its children."""
        return self._lost(f"did not end within {TRIAL_SECONDS:g} s")

    def kill(self) -> None:
        """End the process."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        self._connection.close()

    def _lost(self, why: str) -> Result:
        assert self._trial is not None
        scenario, seed = self._trial
        self.kill()
        self._fork()
        seconds = time.monotonic() - self._started
        return Result(scenario.name, seed, scenario.point(seed), seconds, why)

    def _fork(self) -> None:
        ours, theirs = Pipe()
        self._pid = os.fork()
        if self._pid == 0:
            ours.close()
            _work(theirs, self._base, self._kept)
        theirs.close()
        self._connection = ours


def _work(connection: Connection, base: Path, kept: Path) -> None:
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    code = 1
    try:
        while True:
            scenario, seed = connection.recv()
            connection.send(run_trial(scenario, seed, base, kept))
    except EOFError:
        code = 0
    except BaseException:  # noqa: BLE001 - the parent sees that the worker is gone
        traceback.print_exc()
    finally:
        os._exit(code)
