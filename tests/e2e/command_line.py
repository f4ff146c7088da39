"""``trainsync run`` on an ended run, compared with its monitor and Ray's dashboard."""

import subprocess
import sys
from pathlib import Path


class CommandLine:
    """Runs commands like a user; each must succeed."""

    def __init__(self, kubeconfig: Path, namespace: str) -> None:
        self._where = ("-n", namespace, "--kubeconfig", str(kubeconfig))

    def __call__(self, *words: str) -> tuple[str, str]:
        """Run the command; returns stdout and stderr."""
        code = "from trainsync.cli import main; main()"
        done = subprocess.run(
            [sys.executable, "-c", code, "run", *words, *self._where],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout, done.stderr


def check(command: CommandLine, run: str) -> None:
    """The demo's run: 60 steps, one trainer killed, complete."""
    assert "60/60" in command("status", run)[0]
    told, missing = command("timeline", run)
    assert missing == ""  # the monitor answered through the API server
    for part in ("Attempt 0 was claimed", "Attempt 1 was claimed", "Attempt 0 ended", "Complete"):
        assert part in " ".join(told.split()), told
    assert len(command("logs", run, "--tail", "3")[0].splitlines()) == 3
    assert "committed" in command("logs", run, "--part", "monitor")[0]
    assert run in command("events", run)[0]
