"""What the driver needs of the trainer group, however its processes were started."""

from typing import Any, Final, Protocol

# Of one collective. A rank waits in its first one while rank 0 makes the base model.
COLLECTIVE_TIMEOUT: Final = 180.0
# Of one call on all ranks, from the driver's side.
CALL_TIMEOUT: Final = 300.0


class Trainers(Protocol):
    """All ranks of the trainer group."""

    def call(self, method: str, *arguments: object) -> list[Any]:
        """Call a method of `TrainerRank` on all ranks at once; the results, by rank.

        An error on any rank, or its death, is raised here or ends the process.
        """
        ...
