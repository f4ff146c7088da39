"""Which step is copied next, and which steps stay in the bucket; pure."""

from collections.abc import Collection, Iterable


def next_step(
    committed: Collection[int],
    mirrored: Collection[int],
    keep_every: int | None,
    refused: Collection[int] = (),
) -> int | None:
    """The step to copy now; None: the bucket has what it should have.

    First the multiples of ``keep_every``, oldest first, as the volume's retention may take them;
    then the newest. What is older than the newest in the bucket was superseded while another step
    was copied.

    Args:
        committed: on the volume.
        refused: cannot be copied: the bucket has other saves of these steps.
    """
    missing = sorted(set(committed) - set(mirrored) - set(refused))
    lasting = [step for step in missing if is_lasting(step, keep_every)]
    if lasting:
        return lasting[0]
    newest = max(mirrored, default=-1)
    return missing[-1] if missing and missing[-1] > newest else None


def to_remove(chosen: Iterable[int], keep_every: int | None) -> list[int]:
    """Of the steps that are beyond the last ones kept, those that do not stay for ever."""
    return [step for step in chosen if not is_lasting(step, keep_every)]


def is_lasting(step: int, keep_every: int | None) -> bool:
    """Whether the step is a multiple of ``keep_every``."""
    return keep_every is not None and step % keep_every == 0
