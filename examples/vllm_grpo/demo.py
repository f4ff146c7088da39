"""``make demo-vllm``: train on two vLLM servers, kill one, take the other one out, and judge.

All on this machine's CPU, without Ray and without a cluster.
"""

import argparse
import contextlib
import os
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table
from tiny_grpo.config import Config
from tiny_grpo.promises import Promise
from trainsync import RunContext

from vllm_grpo.history import Step
from vllm_grpo.local_servers import SETTINGS, LocalServer, ServerEndedError
from vllm_grpo.model_folder import write_model
from vllm_grpo.promises import Events, check
from vllm_grpo.rollouts import RolloutError
from vllm_grpo.train import make_config, train

_STEPS: Final = 60
_START_SECONDS: Final = 480.0
_LEAST_STEPS: Final = 12
_KILL_WITHIN_SECONDS: Final = 10.0


def main() -> int:
    """Run the demo; 0 when every promise was kept."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=_STEPS, help=f"default {_STEPS}")
    steps = parser.parse_args().steps
    if steps < _LEAST_STEPS:
        parser.error(f"--steps is {steps}, expected {_LEAST_STEPS} or more")
    console = Console(highlight=False)
    began = time.monotonic()
    directory = Path(tempfile.mkdtemp(prefix="trainsync-vllm-"))
    try:
        demo = Demo(make_config(steps), Path(os.environ["VLLM_ENV"]), directory, console)
        promises = demo.play()
    except (ServerEndedError, RolloutError) as error:
        console.print(f"demo: {error}\nSee {directory}", style="bold red", markup=False)
        return 1
    except KeyboardInterrupt:
        console.print("demo: interrupted")
        shutil.rmtree(directory)
        return 130
    console.print(_versions(demo.steps))
    table = Table("", "promise", "seen", title="What was promised", show_lines=True)
    for promise in promises:
        mark = "[green]kept[/]" if promise.kept else "[bold red]BROKEN[/]"
        table.add_row(mark, promise.text, promise.seen)
    console.print(table)
    kept = sum(promise.kept for promise in promises)
    seconds = time.monotonic() - began
    console.print(f"{kept} of {len(promises)} promises kept, after {seconds:.0f} s in all.")
    if kept < len(promises):
        console.print(f"Logs and checkpoints are in {directory}")
        return 1
    shutil.rmtree(directory)
    return 0


class Demo:
    """One run with two servers.

    Args:
        vllm: the environment of ``make vllm-env``.
        directory: for the run, the model's folder and logs.

    Attributes:
        steps: that were taken.
    """

    def __init__(self, config: Config, vllm: Path, directory: Path, console: Console) -> None:
        self._config = config
        self._directory = directory
        self._console = console
        model = write_model(directory / "model", config)
        self._killed, self._taken_out = self._servers = [
            LocalServer(name, vllm, model, directory / "run", directory, SETTINGS)
            for name in ("server-0", "server-1")
        ]
        self._kill_after = config.steps // 4
        self._restart_after = self._kill_after + max(2, config.steps // 12)
        self._take_out_after = 3 * config.steps // 4
        self._refuted: dict[str, int] = {}
        self._killing = threading.Thread()
        self.steps: list[Step] = []

    def play(self) -> list[Promise]:
        """Train to the end.

        Raises:
            ServerEndedError: a server ended by itself, or did not start in time.
            RolloutError: no server answered in time.
        """
        with self._running() as servers:
            at = [server.at for server in servers]
            environ = os.environ | SETTINGS
            with RunContext.from_env(self._directory / "run", environ=environ) as ctx:
                train(ctx, self._config, lambda: at, self._after)
            self._refuted[self._killed.name] = self._killed.refuted()
        return check(
            self.steps,
            self._config.steps,
            Events(
                self._killed.name,
                self._kill_after,
                self._restart_after,
                self._taken_out.name,
                self._take_out_after,
                self._refuted,
            ),
        )

    @contextlib.contextmanager
    def _running(self) -> Iterator[Sequence[LocalServer]]:
        self._say("Starting two vLLM servers on the CPU, each with an agent (a minute)")
        try:
            for server in self._servers:
                server.start()
                server.start_agent()
            for server in self._servers:
                server.wait(_START_SECONDS, ready=False)
            yield self._servers
        finally:
            for server in self._servers:
                server.close()

    def _after(self, step: Step) -> None:
        self.steps.append(step)
        self._console.print(str(step))
        if step.step == self._kill_after:
            self._say(f"kill -9: {self._killed.name} with its workers; its agent stays")
            self._killing = threading.Thread(target=self._killed.kill, args=(_KILL_WITHIN_SECONDS,))
            self._killing.start()
        if step.step == self._kill_after + 1:
            self._killing.join()  # the next steps are without it
        if step.step == self._restart_after:
            self._say(f"{self._killed.name} is started again, with the weights of its folder")
            self._killed.start()
        if step.step == self._take_out_after:
            self._killed.wait(_START_SECONDS, ready=True)  # one has to serve
            self._say(f"{self._taken_out.name} is taken out")
            self._refuted[self._taken_out.name] = self._taken_out.refuted()
            self._taken_out.take_out()

    def _say(self, text: str) -> None:
        self._console.print(text, style="bold yellow")


def _versions(steps: Sequence[Step]) -> Table:
    """Tokens that were trained on, by version and server."""
    tokens: Counter[tuple[str, int]] = Counter()
    for step in steps:
        tokens.update(step.tokens)
    names = sorted({name for name, _ in tokens})
    table = Table("version", *names, title="Tokens by version")
    failed: Counter[str] = Counter()
    for step in steps:
        failed.update(step.failures)
    for version in sorted({version for _, version in tokens}):
        counts = [tokens[name, version] for name in names]
        table.add_row(str(version), *(f"{count:,}" if count else "-" for count in counts))
    table.add_section()
    table.add_row("requests that failed", *(str(failed[name]) for name in names))
    return table


if __name__ == "__main__":
    sys.exit(main())
