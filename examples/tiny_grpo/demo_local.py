"""The demo without a cluster: train under torchrun, kill a trainer, resume, check the promises.

``make demo-local``, or ``python -m tiny_grpo.demo_local`` with ``examples`` on the path.
"""

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import ray
from rich.console import Console
from rich.table import Table
from trainsync.api import env
from trainsync.api.protocol import SaveKind
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves.manifest import committed_steps
from trainsync.storage.saves.pointers import read_pointer

from tiny_grpo.config import Config
from tiny_grpo.history import Started, Step, read_history
from tiny_grpo.promises import Kill, check

_STEPS: Final = 40
_CHECKPOINT_INTERVAL: Final = 5
_COMMITS_BEFORE_KILL: Final = 3
# So that the next attempt repeats steps, which must give equal losses.
_STEPS_BEFORE_KILL: Final = 2
# Limit of one attempt; the whole demo takes some two minutes.
_ATTEMPT_TIMEOUT: Final = 300.0
# By default Ray reserves a third of the machine's memory.
_OBJECT_STORE_BYTES: Final = 128 * 2**20
_DIRECTORY: Final = Path("build/demo-local")
_COLUMNS: Final = ("attempt", "step", "reward", "committed", "version", "staleness")


class DemoError(Exception):
    """The demo could not run to its end."""


def main() -> int:
    """Run the demo; 0 when every promise was kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=_STEPS, help=f"default {_STEPS}")
    parser.add_argument(
        "--directory",
        type=Path,
        default=_DIRECTORY,
        help=f"for the run, replaced if a demo has made it; default {_DIRECTORY}",
    )
    arguments = parser.parse_args()
    config = Config(steps=arguments.steps)
    console = Console(highlight=False)
    began = time.monotonic()
    directory: Path = arguments.directory.absolute()
    try:
        _make_anew(directory)
        with _local_ray(console):
            demo = _Demo(config, directory, console)
            demo.play()
    except DemoError as error:
        console.print(f"demo: {error}; see {directory}", style="bold red", markup=False)
        return 1
    except KeyboardInterrupt:
        console.print("demo: interrupted")
        return 130
    promises = check(read_history(demo.history), demo.run.root, config.steps, demo.kill)
    table = Table("", "promise", "seen", title="What was promised", show_lines=True)
    for promise in promises:
        mark = "[green]kept[/]" if promise.kept else "[bold red]BROKEN[/]"
        table.add_row(mark, promise.text, promise.seen)
    console.print(table)
    kept = sum(promise.kept for promise in promises)
    seconds = time.monotonic() - began
    console.print(f"{kept} of {len(promises)} promises kept, after {seconds:.0f} s in all.")
    console.print(f"Logs and checkpoints are in {directory}; look at them:", markup=False)
    console.print(f"  {_command()} checkpoints ls {demo.run.root}", markup=False)
    return 0 if kept == len(promises) else 1


def _command() -> str:
    """The `trainsync` command of this environment, by its path where that is not on PATH."""
    return (
        "trainsync"
        if shutil.which("trainsync")
        else str(Path(sys.executable).with_name("trainsync"))
    )


def _make_anew(directory: Path) -> None:
    """Make the directory, in place of one of an earlier demo. Raises `DemoError` of any other."""
    there = {entry.name for entry in directory.iterdir()} if directory.exists() else set()
    logs = {name for name in there if name.startswith("attempt-")}
    # A demo writes a log before anything else: without one, a folder `run` is another's.
    if there - {"run", "history.jsonl"} - logs or (there and not logs):
        raise DemoError("the directory is not one that a demo has made; name another")
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)


@contextlib.contextmanager
def _local_ray(console: Console) -> Iterator[None]:
    """A local Ray that outlives attempts, like the pods of a cluster."""
    console.print("Starting a local Ray for the explorers (5 s)")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    context: Any = ray.init(
        address="local",
        include_dashboard=False,
        log_to_driver=False,
        configure_logging=False,
        object_store_memory=_OBJECT_STORE_BYTES,
    )
    os.environ["RAY_ADDRESS"] = context.address_info["gcs_address"]
    try:
        yield
    finally:
        ray.shutdown()


class _Demo:
    """One run: attempts under torchrun, a kill in the first one, and their history."""

    def __init__(self, config: Config, directory: Path, console: Console) -> None:
        self._config = config
        self._directory = directory
        self._console = console
        self.run = RunDirectory(directory / "run")
        self.history = directory / "history.jsonl"
        self.kill: Kill | None = None
        self._rows = 0

    def play(self) -> None:
        """Run both attempts. Raises `DemoError` when an attempt ends unexpectedly."""
        self._console.print("Starting two trainers with torchrun; they load torch first (15 s)")
        self._console.print("".join(f"{name:>11}" for name in _COLUMNS), style="bold")
        code = self._attempt(0)
        if self.kill is None:
            raise DemoError(f"attempt 0 ended with {code} before a trainer was killed")
        if code == 0:
            raise DemoError("torchrun ended well although a trainer was killed")
        committed = read_pointer(self.run, SaveKind.CHECKPOINT)
        # The trainers may have taken steps between the kill and its effect.
        self.kill = Kill(self._last_step(), committed or 0)
        self._console.print(
            f"torchrun ended with {code}; starting the next attempt", style="yellow"
        )
        code = self._attempt(1)
        if code != 0:
            raise DemoError(f"attempt 1 ended with {code}, expected 0")
        self._console.print(
            f"Complete; checkpoint {read_pointer(self.run, SaveKind.CHECKPOINT)} is committed",
            style="bold green",
        )

    def _attempt(self, number: int) -> int:
        """Run torchrun to its end, showing every step; its exit code."""
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [
            "--nproc-per-node",
            str(self._config.trainers),
            "-m",
            "tiny_grpo.train_torchrun",
        ]
        command += ["--directory", str(self.run.root), "--history", str(self.history)]
        environment = os.environ | {
            env.CHECKPOINT_INTERVAL: str(_CHECKPOINT_INTERVAL),
            "OMP_NUM_THREADS": "1",
        }
        deadline = time.monotonic() + _ATTEMPT_TIMEOUT
        with (self._directory / f"attempt-{number}.log").open("wb") as log:
            process = subprocess.Popen(
                [*command, *self._config.arguments()],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            while process.poll() is None:
                if time.monotonic() > deadline:
                    raise DemoError(f"attempt {number} did not end within {_ATTEMPT_TIMEOUT:g} s")
                self._show()
                self._kill_if_due()
                time.sleep(0.05)
        finally:
            if process.poll() is None:
                # torchrun and its trainers are one session, and so one process group.
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        self._show()
        return process.returncode

    def _show(self) -> None:
        records = read_history(self.history)
        committed = read_pointer(self.run, SaveKind.CHECKPOINT)
        for record in records[self._rows :]:
            if isinstance(record, Started):
                if record.step:
                    self._console.print(
                        f"attempt {record.attempt} resumes after step {record.step}", style="yellow"
                    )
                continue
            cells = (
                record.attempt,
                f"{record.step}/{self._config.steps}",
                f"{record.metrics['reward']:.3f}",
                "-" if committed is None else committed,
                record.version,
                record.step - 1 - record.version,
            )
            self._console.print("".join(f"{cell:>11}" for cell in cells))
        self._rows = len(records)

    def _kill_if_due(self) -> None:
        if self.kill is not None:
            return
        committed = committed_steps(self.run, SaveKind.CHECKPOINT)
        if len(committed) < _COMMITS_BEFORE_KILL:
            return
        if self._last_step() < committed[-1] + _STEPS_BEFORE_KILL:
            return
        (started,) = (r for r in read_history(self.history) if isinstance(r, Started))
        victim = started.trainer_pids[-1]
        self._console.print(f"kill -9 {victim}: the last trainer rank", style="bold red")
        os.kill(victim, signal.SIGKILL)
        self.kill = Kill(self._last_step(), committed[-1])

    def _last_step(self) -> int:
        steps = [r.step for r in read_history(self.history) if isinstance(r, Step)]
        return max(steps, default=0)


if __name__ == "__main__":
    sys.exit(main())
