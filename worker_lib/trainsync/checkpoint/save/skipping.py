"""A save that is given up for want of staging memory, as the coordinator was configured."""

import logging

from trainsync.checkpoint.errors import SaveSkippedError
from trainsync.checkpoint.save.background import BackgroundWrites
from trainsync.checkpoint.save.part_writer import PartWriter, fail_job

logger = logging.getLogger(__name__)


def skip(job: PartWriter, label: str, slots: int, background: BackgroundWrites) -> None:
    """Abort the save for everybody, so that nobody waits for this part.

    Args:
        label: of the part, for people.
        slots: saves that may be staged at once.
    """
    error = SaveSkippedError(f"{slots} saves were staged and not yet written")
    logger.warning("%s is skipped: %s", job, error)

    def report() -> None:
        fail_job(job, error)

    # The disk is slow, or saves would not pile up: the trainer does not wait for the report. Under
    # a name of its own the report does not wait for those saves, either.
    name = f"{job.participant.component} (skipped)"
    try:
        background.start(name, f"{label}-skipped", write=report, tell=lambda: None)
    except RuntimeError:  # the system has no thread left
        report()
