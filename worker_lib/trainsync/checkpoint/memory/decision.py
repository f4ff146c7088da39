"""Which files in memory are dropped; pure."""

from collections.abc import Iterable, Set

from trainsync.checkpoint.memory.place import KeptName


def to_drop(
    files: Iterable[KeptName],
    *,
    attempt: int,
    incarnation: str,
    newest: int | None,
    aborted: Set[int] = frozenset(),
) -> list[KeptName]:
    """Files that no load can need, as a process of that attempt and incarnation sees it.

    What stays: whole files of the newest committed step, of any attempt; what this incarnation
    has saved at that step or later and was not aborted; all of a later attempt.

    Args:
        newest: the newest committed step; None: there is none.
        aborted: steps whose save this incarnation knows to have ended without a commit.
    """
    dropped = []
    for kept in files:
        is_committed = kept.digest is not None and kept.step == newest
        is_own = (kept.attempt, kept.incarnation) == (attempt, incarnation)
        may_commit = is_own and kept.step >= (newest or 0) and kept.step not in aborted
        if not (kept.attempt > attempt or is_committed or may_commit):
            dropped.append(kept)
    return dropped
