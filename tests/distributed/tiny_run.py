"""Runs of the example ``tiny_grpo`` on this machine, for the tests that disturb them."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import ray
from tiny_grpo.config import Config
from tiny_grpo.history import Started, Step, read_history
from trainsync.api import env
from trainsync.api.protocol import SaveKind
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves.manifest import committed_steps

from tests.distributed.processes.forked_workers import forked_python, forked_workers
from tests.distributed.small_ray.starting import small_ray

CONFIG = Config(
    steps=40, digits=2, hidden_size=32, layers=1, base_steps=40, base_batch=16, prompts=8
)
INTERVAL = 4
DEADLINE = 400.0
PYTHONPATH = os.pathsep.join(path for path in sys.path if path)


@contextmanager
def shared_ray() -> Iterator[str]:
    """The address of a local Ray for all runs of a module, as pods outlive attempts."""
    with pytest.MonkeyPatch.context() as patch:
        # Ray's workers inherit it; they import the example as pytest does.
        patch.setenv("PYTHONPATH", PYTHONPATH)
        with small_ray():
            context = ray.init(
                address="local",
                num_cpus=2,
                include_dashboard=False,
                log_to_driver=False,
                object_store_memory=128 * 2**20,
            )
    try:
        yield context.address_info["gcs_address"]
    finally:
        ray.shutdown()


class Run:
    """One run's directory, history and processes.

    Args:
        forked: processes are forked with imports done; else each starts as in a pod.
    """

    def __init__(
        self, directory: Path, ray_address: str, *, forked: bool = True, **sync: str
    ) -> None:
        self._python = forked_python() if forked else [sys.executable]
        self.directory = RunDirectory(directory / "run")
        self.history = directory / "history.jsonl"
        self.log = directory / "log"
        self.environment = {
            **sync,
            **(forked_workers() if forked else {}),
            "RAY_ADDRESS": ray_address,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": PYTHONPATH,
            env.CHECKPOINT_INTERVAL: str(INTERVAL),
        }

    def arguments(self, config: Config) -> list[str]:
        """The options of an attempt."""
        places = ["--directory", str(self.directory.root), "--history", str(self.history)]
        return [*places, *config.arguments()]

    def start(
        self, *module: str, config: Config = CONFIG, options: Sequence[str] = ()
    ) -> subprocess.Popen[bytes]:
        """Start an attempt: ``python -m module…`` with the run's options, and these."""
        command = [*self._python, "-m", *module, *self.arguments(config), *options]
        environ = os.environ | self.environment
        with self.log.open("ab") as log:
            return subprocess.Popen(command, env=environ, stdout=log, stderr=subprocess.STDOUT)

    def end(self, process: subprocess.Popen[bytes]) -> int:
        """The exit code, when the attempt has ended by itself."""
        try:
            return process.wait(timeout=DEADLINE)
        except subprocess.TimeoutExpired:
            pytest.fail(f"did not end within {DEADLINE:g} s:\n{self.log.read_text()[-4000:]}")
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()

    @property
    def records(self) -> list[Started | Step]:
        return read_history(self.history)

    @property
    def started(self) -> list[Started]:
        return [record for record in read_history(self.history) if isinstance(record, Started)]

    @property
    def steps(self) -> list[Step]:
        return [record for record in read_history(self.history) if isinstance(record, Step)]

    @property
    def committed(self) -> list[int]:
        return committed_steps(self.directory, SaveKind.CHECKPOINT)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline, f"not so within {DEADLINE:g} s"
        time.sleep(0.01)  # polling interval
