"""Finds, starts and ends process 1 of a set of namespaces, and runs programs inside.

An init is found in /proc by the path of its spec, so that no stale pid file can lead to a wrong
kill.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from devcluster.errors import DevclusterError
from devcluster.hosts.init import status_path
from devcluster.shell import run, wait_until, write_json

_UNSHARE = [
    "unshare", "-m", "-p", "-n", "-u", "-i", "-f",
    "--mount-proc", "--propagation", "private", "--kill-child",
]  # fmt: skip
_KILL_SECONDS = 30
_ENTER = ["-m", "-p", "-n", "-u", "-i"]


@dataclass(frozen=True)
class Started:
    """An init's status file."""

    running: frozenset[str]
    exited: dict[str, int]
    """Exit code (negative: signal) of components that ran and ended."""


def component(name: str, argv: Sequence[str | Path], log: Path) -> dict[str, Any]:
    """A component in the format of the init's spec."""
    return {"name": name, "argv": [str(word) for word in argv], "log": str(log)}


def write_spec(spec: Path, hostname: str, components: Sequence[dict[str, Any]]) -> None:
    write_json(spec, {"hostname": hostname, "components": list(components)})


def init_argv(spec: Path) -> list[str]:
    """The command that starts an init for ``spec`` in namespaces of its own."""
    package_root = Path(__file__).parents[2]
    python = ["env", f"PYTHONPATH={package_root}", "PYTHONDONTWRITEBYTECODE=1", sys.executable]
    return [*_UNSHARE, *python, "-m", "devcluster.hosts.init", str(spec)]


def start_init(spec: Path, log: Path) -> None:
    """Start an init that outlives this process, and wait until it has prepared its namespaces."""
    status_path(spec).unlink(missing_ok=True)
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as output:
        process = subprocess.Popen(
            init_argv(spec),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )

    def ended() -> str | None:
        code = process.poll()
        return None if code is None else f"it ended with exit code {code}"

    wait_until(
        status_path(spec).exists, what=f"the init of {spec}", seconds=15, logs=[log], alive=ended
    )


def find_init(spec: Path) -> int | None:
    """The pid on this machine of the process 1 that runs ``spec``, or None."""
    wanted = str(spec).encode()
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            words = Path(entry.path, "cmdline").read_bytes().split(b"\0")
            if wanted in words and _is_process_one(int(entry.name)):
                return int(entry.name)
        except (FileNotFoundError, ProcessLookupError):
            continue  # The process ended meanwhile.
    return None


def _is_process_one(pid: int) -> bool:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("NSpid:"):
            numbers = line.split()[1:]
            return len(numbers) > 1 and numbers[-1] == "1"
    return False


def require_init(spec: Path, what: str) -> int:
    pid = find_init(spec)
    if pid is None:
        raise DevclusterError(f"{what} is not running")
    return pid


def read_status(spec: Path) -> Started:
    """The init's last status; empty if the init has not written one."""
    try:
        raw = json.loads(status_path(spec).read_text())
    except FileNotFoundError:
        return Started(frozenset(), {})
    return Started(frozenset(raw["running"]), raw["exited"])


def start_components(spec: Path, names: Sequence[str], logs: Path) -> None:
    """Make the init read its spec again and wait until ``names`` have been started."""
    os.kill(require_init(spec, f"the init of {spec}"), signal.SIGHUP)
    wait_until(
        lambda: set(names) <= read_status(spec).running,
        what=f"{', '.join(names)} to start",
        seconds=15,
        logs=[logs / f"{name}.log" for name in names],
    )


def kill_init(spec: Path) -> bool:
    """End an init and so all processes of its namespaces; False if there was none.

    On return, every process of the namespaces is gone: the kernel ends process 1 last.
    """
    pid = find_init(spec)
    if pid is None:
        return False
    # A pidfd reports the real end of the process; its command line disappears earlier.
    handle = os.pidfd_open(pid)
    try:
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        ended, _, _ = select.select([handle], [], [], _KILL_SECONDS)
    finally:
        os.close(handle)
    if not ended:
        raise DevclusterError(f"process {pid} did not end within {_KILL_SECONDS} s of kill -9")
    return True


def run_inside(pid: int, argv: Sequence[str | Path], *, timeout: float = 60) -> str:
    """Run a program in all namespaces of the init ``pid``; the working directory is /."""
    return run(["nsenter", "-t", str(pid), *_ENTER, "--", *argv], timeout=timeout)


def run_in_network(pid: int, argv: Sequence[str | Path], *, stdin: str | None = None) -> str:
    """Run a program in the network namespace of ``pid`` only; pids keep the machine's numbers."""
    return run(["nsenter", "-t", str(pid), "-n", "--", *argv], stdin=stdin, timeout=20)
