"""Runs a command and measures its time and peak memory."""

import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_SAMPLE_SECONDS = 0.02


@dataclass(frozen=True)
class Ran:
    """Time and memory of a command.

    Attributes:
        seconds: from start to end.
        peak: peak bytes of resident memory, with mapped files.
        peak_own: peak bytes of anonymous memory, which the system cannot reclaim.
        last_line: last line of the output.
    """

    seconds: float
    peak: int
    peak_own: int
    last_line: str


def run(command: Sequence[str], timeout: float) -> Ran:
    """Run ``command`` to its end.

    Raises:
        RuntimeError: the command failed; the message has the end of the output.
        subprocess.TimeoutExpired: the command took longer than ``timeout`` seconds and was killed.
    """
    with tempfile.TemporaryFile() as output:
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        watch = _Watch(process.pid)
        try:
            code = process.wait(timeout)
            seconds = time.perf_counter() - started
        finally:
            process.kill()
            process.wait()
            watch.end()
        output.seek(0)
        said = output.read().decode(errors="replace")
        if code != 0:
            raise RuntimeError(f"{' '.join(command)} ended with {code}: {said[-2000:]}")
    return Ran(seconds, watch.peak, watch.peak_own, said.strip().rpartition("\n")[2])


class _Watch:
    """Samples a child process's memory until stopped. The kernel's peak values are not used: they
    include the child's memory before the exec of the command."""

    def __init__(self, pid: int) -> None:
        self.peak = self.peak_own = 0
        self._status = Path(f"/proc/{pid}/status")
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(_SAMPLE_SECONDS):
            try:
                rows = self._status.read_text().splitlines()
            except OSError:  # the process has ended
                return
            kib = {row.split(":")[0]: int(row.split()[1]) for row in rows if row.endswith(" kB")}
            self.peak = max(self.peak, kib.get("VmHWM", 0) << 10)
            own = (kib.get("RssAnon", 0) + kib.get("RssShmem", 0)) << 10
            self.peak_own = max(self.peak_own, own)
