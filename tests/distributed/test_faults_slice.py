"""A slice of the fault matrix (`make faults`): each fault a few times, with the same code."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.faults.scenarios import ALL
from tests.faults.scenarios.of_buckets import OF_BUCKETS
from tests.faults.scenarios.of_servers import OF_SERVERS

# All of them run at the first test, in a process of their own: this one may have threads, and
# trials are forked.
pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

TIMES = 1
# The others of servers and buckets take as long again: `make faults` runs them.
OF_BUCKETS_TOO = {"bucket_emptied", "bucket_stale_list"}
LEFT_OUT = {scenario.name for scenario in (*OF_SERVERS, *OF_BUCKETS)} - OF_BUCKETS_TOO
# tests/unit/checkpoint kills ranks, and loses a pod, at points of a save that keeps, too.
LEFT_OUT |= {"keeping_rank_killed", "pod_lost"}
SLICE = sorted(ALL.keys() - LEFT_OUT)
REPOSITORY = Path(__file__).parents[2]
# Trials make and remove thousands of files. ext4 looks at every inode that was freed within a
# minute before it makes the next: a sixth of the processor. `make faults` is on a disk.
IN_MEMORY = Path("/dev/shm")
NEEDED = 2 << 30


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("faults")
    words = [*SLICE, "--times", str(TIMES), "--first", "0", "--output", str(output)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.faults", *words],
        cwd=REPOSITORY,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=850,
        check=False,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return output


def environment() -> dict[str, str]:
    if IN_MEMORY.is_dir() and shutil.disk_usage(IN_MEMORY).free > NEEDED:
        return {**os.environ, "TMPDIR": str(IN_MEMORY)}
    return {**os.environ}


def read(results: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((results / f"{name}.json").read_text())
    return found


@pytest.mark.parametrize("name", SLICE)
def test_every_promise_holds(results: Path, name: str) -> None:
    found = read(results, name)
    if found["skipped"]:
        pytest.skip(found["skipped"])
    assert found["broken_trials"] == []
    assert found["held"] == found["times"] >= TIMES
    assert set(found["points"]) == set(ALL[name].points), "every point is struck at least once"
