"""Memory that a process may still take before the system would end a process."""

from pathlib import Path
from typing import Final

from trainsync.integrations.vllm.errors import NoRoomError

_ROOT: Final = Path("/")
_GROUPS: Final = (  # of a container, by either version of control groups
    ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    (
        "sys/fs/cgroup/memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
)


def free_memory(root: Path = _ROOT) -> int | None:
    """Bytes that the host, and the container's limit, leave; None: unknown.

    Pages of files that are not in use count as free.
    """
    found = []
    try:
        found.append(_row(root / "proc/meminfo", "MemAvailable:") * 1024)
    except (OSError, ValueError):
        return None
    for folder, limit, usage, inactive in _GROUPS:
        group = root / folder
        try:
            most = int((group / limit).read_text())
            used = int((group / usage).read_text()) - _row(group / "memory.stat", inactive)
        except (OSError, ValueError):  # another version, or "max"
            continue
        found.append(most - used)
    return min(found)


def _row(file: Path, name: str) -> int:
    for line in file.read_text().splitlines():
        if line.split()[:1] == [name]:
            return int(line.split()[1])
    raise ValueError(f"{file} has no {name}")


def check_room(size: int, processes: int, free: int | None) -> None:
    """See that a second copy of the weights fits.

    Args:
        size: bytes of the copy.
        processes: that make one at the same time, in the same memory.
        free: of `free_memory`.

    Raises:
        NoRoomError: the copy does not fit, or the free memory is not known.
    """
    needed = (size + size // 4) * processes  # packed weights come before the others go
    if free is None or needed > free:
        known = "an unknown number is" if free is None else f"{free} are"
        raise NoRoomError(
            f"a second copy of the weights needs {needed} bytes of memory, and {known} free"
        )


def check_rest(size: int, processes: int, free: int | None) -> None:
    """See that others leave enough memory while a second copy is made: such as engines of the same
    server that do not know of each other. Arguments as of `check_room`.

    Raises:
        NoRoomError: less than an eighth of the copies is left, or the free memory is not known.
    """
    least = size // 8 * processes
    if free is None or free < least:
        known = "an unknown number of" if free is None else str(free)
        raise NoRoomError(
            f"{known} bytes of memory are left beside a second copy of the weights, not {least}"
        )
