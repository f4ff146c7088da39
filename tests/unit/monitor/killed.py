"""A monitor that is killed at a phase: ``python -m tests.unit.monitor.killed ROOT PHASE``.

Step 10 is committed already; it commits 20 (or, for ``aborting``, aborts it), keeping one.
"""

import os
import signal
import sys
from datetime import UTC, datetime
from pathlib import Path

from trainsync import failpoints
from trainsync.api.protocol import FailureReport, ParticipantRef
from trainsync.monitor.core.core import CoreSettings, MonitorCore
from trainsync.storage.layout import RunDirectory

from tests.unit.monitor.saves import CHECKPOINT, FIRST, request


def main(root: Path, fatal: str) -> None:
    seen: list[str] = []
    kind, _, number = fatal.partition(":")

    def phase(name: str) -> None:
        seen.append(name)
        if name == kind and seen.count(name) == int(number or 1):
            os.kill(os.getpid(), signal.SIGKILL)

    failpoints.enable(failpoints.COMMIT, phase)
    core = MonitorCore(
        RunDirectory(root),
        CoreSettings(max_to_keep=1),
        clock=lambda: datetime.now(UTC),
    )
    core.saves.register(FIRST, request(20))
    if kind == "aborting":
        who = ParticipantRef(component="model", rank=1)
        report = FailureReport(kind=CHECKPOINT, step=20, participant=who, error="boom")
        core.saves.failure(FIRST, report)
    core.tick()
    sys.exit(f"the phase {fatal} never came, only {seen}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
