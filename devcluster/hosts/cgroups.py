"""The cgroups (v1) of a node's pods: one root for each node under every controller."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from devcluster.errors import DevclusterError

_ROOT = Path("/sys/fs/cgroup")
_CONTROLLERS = (
    "cpu", "cpuacct", "cpuset", "memory", "devices", "freezer", "blkio", "pids", "systemd",
)  # fmt: skip
_HIERARCHIES = (*_CONTROLLERS, "unified")
"""runc also makes its cgroups in the v2 hierarchy, if there is one."""


def create(name: str) -> None:
    """Make the root ``name`` under every controller, so that the kubelet finds it.

    Raises DevclusterError where the machine offers only cgroup v2.
    """
    for controller in _CONTROLLERS:
        parent = _ROOT / controller
        if not parent.is_dir():
            raise DevclusterError(
                f"{parent} is missing: devcluster needs the cgroup v1 controllers "
                f"({', '.join(_CONTROLLERS)}) mounted below {_ROOT}"
            )
        (parent / name).mkdir(exist_ok=True)
    for file in ("cpuset.cpus", "cpuset.mems"):
        # No process may run in a new, empty cpuset.
        value = (_ROOT / "cpuset" / file).read_text()
        (_ROOT / "cpuset" / name / file).write_text(value)


def remove(names: Iterable[str], *, seconds: float = 10) -> None:
    """Remove these roots and all cgroups below; they must hold no process.

    A cgroup stays busy for a moment after its last process ended, so this function retries for
    ``seconds`` and then raises DevclusterError.
    """
    wanted = list(names)
    deadline = time.monotonic() + seconds
    while left := [root for root in existing(wanted) if not _remove_tree(root)]:
        if time.monotonic() >= deadline:
            raise DevclusterError(f"cgroups are still busy after {seconds:.0f} s: {left[0]}")
        time.sleep(0.1)


def existing(names: Iterable[str]) -> list[Path]:
    """The existing directories of these roots."""
    candidates = [_ROOT / controller / name for controller in _HIERARCHIES for name in names]
    return [path for path in candidates if path.is_dir()]


def _remove_tree(root: Path) -> bool:
    directories = [path for path in root.rglob("*") if path.is_dir()]
    try:
        for directory in sorted(directories, key=lambda path: len(path.parts), reverse=True):
            directory.rmdir()
        root.rmdir()
    except FileNotFoundError:
        return not root.exists()
    except OSError:
        return False  # EBUSY: the caller tries again until its deadline.
    return True
