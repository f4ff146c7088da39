"""Runs the commands of the documentation's pages against a cluster."""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.unit.docs.commands import typed
from tests.unit.docs.pages import Block

# Commands that run until they are interrupted.
_ENDLESS = re.compile(r"\bport-forward\b| -w\b| --watch\b| --follow\b")
# `helm test` gives its pod two minutes, which begin before the operator is ready.
_DEADLINE = 180.0


@dataclass
class Reader:
    """Runs the lines of blocks in bash.

    ``words``: replacements for the names that a page leaves to its reader; keys are regular
    expressions. ``passed_over``: commands that are not run.
    """

    directory: Path
    environment: Mapping[str, str]
    words: Mapping[str, str]
    passed_over: frozenset[str]

    def follow(self, block: Block) -> str:
        """Run a block line by line; returns the output. Every command must succeed.

        A command without an end must print output, and runs until the end of the block.
        """
        shown = []
        with ExitStack() as open_commands:
            for line in typed(block):
                command = line.partition(" #")[0].strip()
                if not command or command in self.passed_over:
                    continue
                for pattern, word in self.words.items():
                    command = re.sub(pattern, word, command)
                if _ENDLESS.search(command):
                    shown.append(open_commands.enter_context(self._endless(command)))
                else:
                    shown.append(self.type(command))
        return "\n".join(shown)

    def type(self, command: str) -> str:
        """Run one command, which must succeed; returns its stdout."""
        shell = subprocess.Popen(
            ["bash", "-eu", "-o", "pipefail", "-c", command],
            cwd=self.directory,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        late = ""
        try:
            shown, complaints = shell.communicate(timeout=_DEADLINE)
        except subprocess.TimeoutExpired:
            late = f"was not at an end after {_DEADLINE:.0f} s"
            os.killpg(shell.pid, signal.SIGKILL)  # with bash's children
            shown, complaints = shell.communicate()
        assert shell.returncode == 0, f"{command} {late}\n{shown}{complaints}"
        return shown

    @contextmanager
    def _endless(self, command: str) -> Iterator[str]:
        with tempfile.NamedTemporaryFile(
            "w", dir=self.directory, suffix=".log", delete=False
        ) as output:
            shell = subprocess.Popen(
                ["bash", "-eu", "-c", command],
                cwd=self.directory,
                env={**self.environment, "PYTHONUNBUFFERED": "1"},
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            yield self._first_words(command, shell, Path(output.name))
        finally:
            if shell.poll() is None:
                os.killpg(shell.pid, signal.SIGKILL)
                shell.wait()

    @staticmethod
    def _first_words(command: str, shell: subprocess.Popen[bytes], log: Path) -> str:
        deadline = time.monotonic() + _DEADLINE
        while time.monotonic() < deadline:
            said = log.read_text()
            assert shell.poll() is None, f"{command}: ended with {shell.poll()}\n{said}"
            if said:
                return said
            time.sleep(0.1)
        raise AssertionError(f"{command}: nothing came within {_DEADLINE:.0f} s")


def environment(kubeconfig: Path, *folders: Path) -> dict[str, str]:
    """The environment of a shell with kubectl, helm and trainsync in PATH."""
    found = [str(folder) for folder in (Path(sys.executable).parent, *folders)]
    path = os.pathsep.join([*found, os.environ["PATH"]])
    return {**os.environ, "PATH": path, "KUBECONFIG": str(kubeconfig), "COLUMNS": "150"}
