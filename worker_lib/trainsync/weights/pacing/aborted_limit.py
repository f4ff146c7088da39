"""How long training does without versions whose saves were aborted. Pure."""

from collections.abc import Mapping
from typing import Final

from trainsync.api.protocol import is_skip
from trainsync.weights.errors import WeightsUnavailableError

MOST_IN_A_ROW: Final = 3
"""What the styles promise of staleness gives way with each, so they are bounded."""


def check_aborted(aborted: Mapping[int, str], published: int | None) -> None:
    """See that training can go on without what was aborted since the ``published`` version.

    Versions that were skipped are not counted: an earlier save is still being written then, and
    comes to its own end.

    Args:
        aborted: versions that came to nothing, and why.

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
