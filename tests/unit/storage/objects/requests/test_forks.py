"""A process that was forked from one that has used a store is told so, and does not hang."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, signal, sys
from trainsync.storage.objects.errors import StoreRefusedError
from trainsync.storage.objects.opening import open_store

url, first = sys.argv[1:]
if first == "used":
    open_store(url).create("a", b"x")
child = os.fork()
if child == 0:
    signal.alarm(20)
    try:
        print(open_store(url).find("a"), flush=True)
    except StoreRefusedError as error:
        print(error, flush=True)
    os._exit(0)
os.waitpid(child, 0)
open_store(url).find("a")
"""


@pytest.mark.parametrize(
    ("first", "said"),
    [("used", "was forked from one that had used a store"), ("unused", "None")],
)
def test_a_forked_child_is_refused_only_after_its_parent_had_used_a_store(
    tmp_path: Path, first: str, said: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, f"file://{tmp_path}", first],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert said in done.stdout
