"""Limits consecutive aborted versions. Pure."""

from collections.abc import Mapping
from typing import Final

from trainsync.api.protocol import is_skip
from trainsync.weights.errors import WeightsUnavailableError

MOST_IN_A_ROW: Final = 3
"""Each aborted version weakens the staleness that the styles promise."""


def check_aborted(aborted: Mapping[int, str], published: int | None) -> None:
    """Check that training can go on without the versions aborted since the ``published`` one.

    Versions that were skipped are not counted: an earlier save is still being written then, and
    comes to its own end.

    Args:
        aborted: versions whose saves were aborted, and why.

    Raises:
        WeightsUnavailableError: there is none at all, or more than `MOST_IN_A_ROW` failed.
    """
    lacking = sorted(v for v in aborted if published is None or v > published)
    if lacking and published is None:
        raise WeightsUnavailableError(
            f"version {lacking[-1]} was aborted, and explorers have none to make batches with: "
            f"{aborted[lacking[-1]]}"
        )
    failed = [v for v in lacking if not is_skip(aborted[v])]
    if len(failed) > MOST_IN_A_ROW:
        raise WeightsUnavailableError(
            f"{len(failed)} versions in a row were aborted, and training goes on without "
            f"{MOST_IN_A_ROW} at most; explorers have version {published}, and version "
            f"{failed[-1]} was aborted: {aborted[failed[-1]]}"
        )
