"""Runs programs, waits with a deadline, writes files atomically, shows progress."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from devcluster.errors import DevclusterError

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
# Of Kubernetes' programs: a third of the API server's processor time collected garbage, as each of
# its requests leaves some megabytes and little stays. Memory is plentiful here, processors are not.
GO_ENVIRONMENT = {"GOGC": "400", "GOMEMLIMIT": "2GiB"}
_POLL_SECONDS = 0.1
_TAIL_LINES = 15


class Progress:
    """Progress lines on stderr, each with the seconds since the start."""

    def __init__(self) -> None:
        self._start = time.monotonic()

    def say(self, sentence: str) -> None:
        seconds = time.monotonic() - self._start
        print(f"[{seconds:6.1f}s] {sentence}", file=sys.stderr, flush=True)


def run(
    argv: Sequence[str | Path],
    *,
    timeout: float = 60,
    stdin: str | None = None,
    env: dict[str, str] | None = None,
    cwd: Path | None = None,
) -> str:
    """Run a program to its end and return its stdout.

    Raises DevclusterError with the last lines of its output if it fails or takes longer than
    ``timeout`` seconds.
    """
    words = [str(word) for word in argv]
    shown = " ".join(words[:6]) + (" ..." if len(words) > 6 else "")
    try:
        done = subprocess.run(
            words,
            input=stdin,
            stdin=subprocess.DEVNULL if stdin is None else None,
            capture_output=True,
            text=True,
            timeout=timeout,
            env=env,
            cwd=cwd,
            check=False,
        )
    except FileNotFoundError as error:
        raise DevclusterError(f"`{words[0]}` is not installed, needed for `{shown}`") from error
    except subprocess.TimeoutExpired as error:
        raise DevclusterError(f"`{shown}` did not end within {timeout:.0f} s") from error
    if done.returncode != 0:
        lines = (done.stderr + done.stdout).strip().splitlines()[-_TAIL_LINES:]
        raise DevclusterError(
            f"`{shown}` failed with exit code {done.returncode}:\n  " + "\n  ".join(lines)
        )
    return done.stdout


def wait_until(
    ready: Callable[[], bool],
    *,
    what: str,
    seconds: float,
    logs: Iterable[Path] = (),
    alive: Callable[[], str | None] = lambda: None,
) -> None:
    """Poll ``ready`` until it is true.

    ``alive`` may return a reason to stop early (a needed program has ended). Raises DevclusterError
    with the last lines of ``logs`` when ``seconds`` are over.
    """
    deadline = time.monotonic() + seconds
    while not ready():
        reason = alive()
        if reason is None and time.monotonic() >= deadline:
            reason = f"not within {seconds:.0f} s"
        if reason is not None:
            raise DevclusterError(f"waited in vain for {what}: {reason}" + tail(logs))
        time.sleep(_POLL_SECONDS)


def tail(logs: Iterable[Path]) -> str:
    """The last lines of log files, each under its name, to append to a message."""
    parts = []
    for log in logs:
        try:
            lines = log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        except FileNotFoundError:
            lines = ["(no such file)"]
        parts.append(f"\n--- the end of {log}\n" + "\n".join(lines))
    return "".join(parts)


def write_atomically(path: Path, content: str | bytes, *, mode: int = 0o644) -> None:
    """Write a file so that readers see the old or the new content, also after a crash."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    data = content.encode() if isinstance(content, str) else content
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(file.fileno(), mode)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make renames within a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    write_atomically(path, json.dumps(value, indent=2) + "\n")
