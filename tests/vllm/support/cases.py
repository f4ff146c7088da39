"""Scripts of cases that run in the environment of vLLM, and print one line for each that holds."""

import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.vllm.conftest import SECONDS
from tests.vllm.support.server import environment, vllm_environment


def check_cases(
    script: Path, plugin: Path, arguments: Sequence[Path] = (), **variables: str
) -> None:
    """Run a script; every one of its cases must hold.

    Args:
        plugin: see `environment`.
        variables: of its environment, beside those of `environment`.
    """
    done = subprocess.run(
        [vllm_environment() / "bin/python", script, *arguments],
        env={**environment(plugin), **variables},
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    counts = re.findall(r"^CASES (\d+)$", done.stdout, re.MULTILINE)
    assert counts, done.stderr[-4000:]
    assert done.stdout.count("CASE ") == int(counts[0]), done.stdout + done.stderr[-8000:]
