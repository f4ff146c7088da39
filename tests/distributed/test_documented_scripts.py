"""The scripts and commands of the documentation that are marked to be run, as a reader runs them.

What a mark says is in `tests.unit.docs.pages`. A page's blocks are run in their order, in one
directory, by bash.
"""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.docs.pages import ROOT, Block, blocks, pages

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(900)]

_RUN = re.compile(r'run(?P<fails> fails)?(?: shows "(?P<shows>.+)")?')
_PAGES = [page for page in pages() if any(b.directive.startswith("run") for b in blocks(page))]
# Of one block; generous, since torch and Ray start slowly on a busy machine.
_DEADLINE = 240.0


@pytest.mark.parametrize("page", _PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_says_happens_when_it_is_followed(page: Path, tmp_path: Path) -> None:
    for block in blocks(page):
        if block.directive.startswith("file "):
            (tmp_path / block.directive.removeprefix("file ")).write_text(block.text)
        elif match := _RUN.fullmatch(block.directive):
            code, said = _run(block, tmp_path)
            assert (code != 0) == bool(match["fails"]), f"{block.where}: code {code}\n{said}"
            assert (match["shows"] or "") in said, f"{block.where}:\n{said}"


def test_the_tutorial_and_the_fsdp2_page_are_run() -> None:
    assert {"tutorial.md", "use-with-fsdp2.md"} <= {page.name for page in _PAGES}


def _run(block: Block, directory: Path) -> tuple[int, str]:
    """Exit code and output of a block in a shell of its own."""
    own = ("TRAINSYNC_", "RAY_", "PYTEST_")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(own)} | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": "",
        "OMP_NUM_THREADS": "1",
        "RAY_AUTH_MODE": "disabled",  # else a token would be left in the home directory
        "RAY_USAGE_STATS_ENABLED": "0",
        "COLUMNS": "120",
    }
    # Into a file: Ray's processes may hold a pipe open for longer than the script lives.
    log = directory / "log"
    with log.open("w") as output:
        shell = subprocess.Popen(
            ["bash", "-eu", "-o", "pipefail", "-c", block.text],
            cwd=directory,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = shell.wait(_DEADLINE)
        except subprocess.TimeoutExpired:
            os.killpg(shell.pid, signal.SIGKILL)
            pytest.fail(f"{block.where} took longer than {_DEADLINE:.0f} s:\n{log.read_text()}")
    return code, log.read_text()
