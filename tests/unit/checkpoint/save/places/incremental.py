"""A run in a store whose saves are incremental."""

from typing import Final

from trainsync import RunContext

URL: Final = "s3://bucket/runs/a"
INCREMENTAL: Final = {"TRAINSYNC_CHECKPOINT_INCREMENTAL": "true"}


def context(**environ: str) -> RunContext:
    """The run's next attempt."""
    return RunContext.from_env(URL, environ=INCREMENTAL | environ)
