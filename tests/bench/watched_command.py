"""Run a command and say how long it took, and the most memory that it held."""

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
    """What a command cost.

    Attributes:
        seconds: from its start to its end.
        peak: bytes of resident memory, with files that it maps.
        peak_own: bytes of memory that no file stands behind, which the system cannot take back.
        last_line: of what it printed.
    """

    seconds: float
    peak: int
    peak_own: int
    last_line: str


def run(command: Sequence[str], timeout: float) -> Ran:
    """Run ``command`` to its end.

    Raises:
        RuntimeError: it failed; holds the end of what it printed.
        subprocess.TimeoutExpired: it was not over in ``timeout`` seconds; it is killed.
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
    """Looks at a process of one's own until told to end. Its marks of a whole life are not asked
    for when it has ended, since they include what the process was before it became the command."""

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
            except OSError:  # it has ended
                return
            kib = {row.split(":")[0]: int(row.split()[1]) for row in rows if row.endswith(" kB")}
            self.peak = max(self.peak, kib.get("VmHWM", 0) << 10)
            own = (kib.get("RssAnon", 0) + kib.get("RssShmem", 0)) << 10
            self.peak_own = max(self.peak_own, own)
