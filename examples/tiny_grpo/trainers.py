"""The driver's interface of the trainer group, under Ray or torchrun."""

from typing import Any, Final, Protocol

# Limit of one collective. In the first one, ranks wait while rank 0 makes the base model.
COLLECTIVE_TIMEOUT: Final = 180.0
# Limit of one call on all ranks, at the driver.
CALL_TIMEOUT: Final = 300.0


class Trainers(Protocol):
    """All ranks of the trainer group."""

    def call(self, method: str, *arguments: object) -> list[Any]:
        """Call a method of `TrainerRank` on all ranks at once; returns the results by rank.

        The error or death of a rank is raised here or ends the process.
        """
        ...

    def check(self) -> None:
        """See that all ranks live, while none of them is called."""
        ...
