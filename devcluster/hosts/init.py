"""Process 1 of the control plane's namespaces and of each node's.

``python3 -m devcluster.hosts.init SPEC`` prepares its mounts, starts the programs in its spec,
reaps dead processes, and writes the state of the programs beside the spec (``init.status.json``).
On SIGHUP it reads the spec again and starts the programs that do not run.

The init restarts no program: ``up`` repairs dead programs, and a test that kills a program needs it
dead. When process 1 is killed, the kernel ends all processes of its namespaces.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from devcluster.shell import GO_ENVIRONMENT, PATH, write_json

_WAKE = {signal.SIGCHLD, signal.SIGHUP}

# The kubelet sets these for the whole machine, so it gets copies instead.
_KUBELET_SYSCTLS = {
    "vm/overcommit_memory": "1",
    "vm/panic_on_oom": "0",
    "kernel/panic": "10",
    "kernel/panic_on_oops": "1",
    "kernel/keys/root_maxkeys": "1000000",
    "kernel/keys/root_maxbytes": "25000000",
}


@dataclass(frozen=True)
class Component:
    """A program that the init runs."""

    name: str
    argv: list[str]
    log: str
    env: dict[str, str]

    @classmethod
    def parse(cls, raw: dict[str, Any]) -> Component:
        return cls(raw["name"], raw["argv"], raw["log"], raw.get("env", {}))


def status_path(spec: Path) -> Path:
    """Path of the status file of the init of ``spec``."""
    return spec.with_name("init.status.json")


def main(argv: list[str]) -> int:
    spec = Path(argv[1])
    os.chdir("/")
    # Blocked, not handled: a blocked signal stays pending, and sigwaitinfo receives it without a
    # race.
    signal.pthread_sigmask(signal.SIG_BLOCK, _WAKE)
    hostname = json.loads(spec.read_text())["hostname"]
    _prepare_namespaces(hostname)
    supervisor = _Supervisor(spec)
    supervisor.start_missing()
    while True:
        info = signal.sigwaitinfo(_WAKE)
        if info.si_signo == signal.SIGHUP:
            supervisor.start_missing()
        supervisor.reap()


def _prepare_namespaces(hostname: str) -> None:
    _mount("--make-rshared", "/")
    # Files in these directories must end with the namespace, not stay on the machine.
    for path in ("/run", "/var/log", "/var/lib/cni"):
        Path(path).mkdir(parents=True, exist_ok=True)
        _mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", path)
    Path("/run/lock").mkdir()
    for name, value in _KUBELET_SYSCTLS.items():
        if not Path("/proc/sys", name).exists():
            continue
        stand_in = Path("/run/devcluster/sysctl") / name
        stand_in.parent.mkdir(parents=True, exist_ok=True)
        stand_in.write_text(value + "\n")
        _mount("--bind", str(stand_in), f"/proc/sys/{name}")
    Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
    Path("/proc/sys/kernel/hostname").write_text(hostname)
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True, env={"PATH": PATH}, timeout=10)


def _mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True, env={"PATH": PATH}, timeout=10)


class _Supervisor:
    """Starts components and tracks which of them run."""

    def __init__(self, spec: Path) -> None:
        self._spec = spec
        self._pids: dict[str, int] = {}
        self._exits: dict[str, int] = {}

    def start_missing(self) -> None:
        """Start every component of the spec that does not run, and write the status."""
        self.reap()
        for raw in json.loads(self._spec.read_text())["components"]:
            component = Component.parse(raw)
            if component.name not in self._pids:
                self._pids[component.name] = _spawn(component)
                self._exits.pop(component.name, None)
        self._write_status()

    def reap(self) -> None:
        """Reap dead components and orphans of all programs."""
        changed = False
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                break
            if pid == 0:
                break
            for name in [name for name, known in self._pids.items() if known == pid]:
                del self._pids[name]
                self._exits[name] = os.waitstatus_to_exitcode(status)
                changed = True
        if changed:
            self._write_status()

    def _write_status(self) -> None:
        write_json(status_path(self._spec), {"running": sorted(self._pids), "exited": self._exits})


def _spawn(component: Component) -> int:
    log = Path(component.log)
    log.parent.mkdir(parents=True, exist_ok=True)
    append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    return os.posix_spawnp(
        component.argv[0],
        component.argv,
        {"PATH": PATH, "HOME": "/root", **GO_ENVIRONMENT, **component.env},
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), append, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
        setsigmask=[],
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv))
