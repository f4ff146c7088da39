"""Save options of verl's workers, from environment variables: verl has no settings for these."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal, Self

from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.runtime.context import RunContext

OVERLAPPED: Final = "TRAINSYNC_VERL_OVERLAPPED"
WHEN_FULL: Final = "TRAINSYNC_VERL_WHEN_FULL"


@dataclass(frozen=True)
class SaveSettings:
    """See `CheckpointCoordinator`, whose defaults apply to unset options."""

    overlapped: bool = False
    when_full: Literal["wait", "skip"] = "wait"

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> Self:
        """Raises `ValueError` for an invalid value; names the variable."""
        overlapped = environ.get(OVERLAPPED, "false")
        if overlapped not in ("true", "false"):
            raise ValueError(f"{OVERLAPPED} is {overlapped!r}; expected true or false")
        when_full = environ.get(WHEN_FULL, "wait")
        if when_full == "wait":
            return cls(overlapped == "true", "wait")
        if when_full == "skip":
            return cls(overlapped == "true", "skip")
        raise ValueError(f"{WHEN_FULL} is {when_full!r}; expected wait or skip")

    def coordinator(self, context: RunContext, component_prefix: str) -> CheckpointCoordinator:
        """This rank's coordinator with these options."""
        return context.coordinator(
            when_full=self.when_full,
            overlapped=self.overlapped,
            component_prefix=component_prefix,
        )
