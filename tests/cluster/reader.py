"""Somebody who follows the pages of the documentation at a terminal, with a cluster."""

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

# Commands that go on until somebody ends them.
_ENDLESS = re.compile(r"\bport-forward\b| -w\b| --watch\b| --follow\b")
# `helm test` gives its pod two minutes, which begin while the operator still starts.
_DEADLINE = 180.0


@dataclass
class Reader:
    """Types the lines of blocks into bash.

    ``words``: what to put for the names that a page leaves to its reader; regular expressions.
    ``passed_over``: commands that are not typed here.
    """

    directory: Path
    environment: Mapping[str, str]
    words: Mapping[str, str]
    passed_over: frozenset[str]

    def follow(self, block: Block) -> str:
        """Type a block, line by line; returns what was shown. Every command must succeed.

        A command without an end has to show something, and lasts as long as the block.
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
            os.killpg(shell.pid, signal.SIGKILL)  # with what bash has started
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
    """That of a shell in which kubectl, helm and trainsync are found."""
    found = [str(folder) for folder in (Path(sys.executable).parent, *folders)]
    path = os.pathsep.join([*found, os.environ["PATH"]])
    return {**os.environ, "PATH": path, "KUBECONFIG": str(kubeconfig), "COLUMNS": "150"}
