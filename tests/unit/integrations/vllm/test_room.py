"""A second copy of a model is made only where memory is known to have room for it."""

from pathlib import Path

import pytest
from trainsync.integrations.vllm.errors import NoRoomError
from trainsync.integrations.vllm.room import check_rest, check_room, free_memory

_GB = 1 << 30


def _write(root: Path, **files: str) -> Path:
    for name, text in files.items():
        file = root / name.replace("__", "/").replace("_DOT_", ".")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def _host(root: Path) -> Path:
    return _write(root, proc__meminfo=f"MemTotal: 99 kB\nMemAvailable: {8 * _GB >> 10} kB\n")


def test_the_hosts_memory_counts_where_there_is_no_limit(tmp_path: Path) -> None:
    assert free_memory(_host(tmp_path)) == 8 * _GB
    _write(
        tmp_path,
        sys__fs__cgroup__memory_DOT_max="max\n",
        sys__fs__cgroup__memory_DOT_current="5\n",
        sys__fs__cgroup__memory_DOT_stat="inactive_file 0\n",
    )
    assert free_memory(tmp_path) == 8 * _GB


def test_a_containers_limit_counts_without_pages_of_files_that_are_not_in_use(
    tmp_path: Path,
) -> None:
    second = _write(
        _host(tmp_path / "second"),
        sys__fs__cgroup__memory_DOT_max=f"{4 * _GB}\n",
        sys__fs__cgroup__memory_DOT_current=f"{3 * _GB}\n",
        sys__fs__cgroup__memory_DOT_stat=f"anon 1\ninactive_file {_GB}\n",
    )
    assert free_memory(second) == 2 * _GB
    first = _write(
        _host(tmp_path / "first"),
        sys__fs__cgroup__memory__memory_DOT_limit_in_bytes=f"{4 * _GB}\n",
        sys__fs__cgroup__memory__memory_DOT_usage_in_bytes=f"{3 * _GB}\n",
        sys__fs__cgroup__memory__memory_DOT_stat=f"inactive_file 0\ntotal_inactive_file {_GB}\n",
    )
    assert free_memory(first) == 2 * _GB


def test_memory_that_nobody_knows_has_no_room(tmp_path: Path) -> None:
    assert free_memory(tmp_path) is None
    with pytest.raises(NoRoomError, match="unknown"):
        check_room(1, 1, None)


def test_each_worker_of_a_host_needs_room_and_a_quarter_more() -> None:
    check_room(4, 2, 10)
    with pytest.raises(NoRoomError, match="needs 10 bytes of memory, and 9 are free"):
        check_room(4, 2, 9)


def test_others_must_leave_an_eighth_of_the_copies() -> None:
    check_rest(8, 2, 2)
    with pytest.raises(NoRoomError, match=r"1 bytes of memory are left beside .*, not 2"):
        check_rest(8, 2, 1)
    with pytest.raises(NoRoomError, match="unknown"):
        check_rest(8, 2, None)
