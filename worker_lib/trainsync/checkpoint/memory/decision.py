"""Which files in memory are dropped, and which of these give their memory to others; pure."""

from collections.abc import Collection, Iterable, Set

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
    has saved at that step or later and was not aborted; all of a later attempt. Spare files are
    among those that no load can need.

    Args:
        newest: the newest committed step; None: there is none.
        aborted: steps whose save this incarnation knows to have ended without a commit.
    """
    dropped = []
    for kept in files:
        is_committed = kept.digest is not None and kept.step == newest
        is_own = (kept.attempt, kept.incarnation) == (attempt, incarnation)
        is_in_time = kept.step >= (newest or 0) and kept.step not in aborted
        may_commit = is_own and is_in_time and not kept.is_spare
        if not (kept.attempt > attempt or is_committed or may_commit):
            dropped.append(kept)
    return dropped


def to_spare(
    files: Iterable[KeptName],
    dropped: Collection[KeptName],
    *,
    attempt: int,
    incarnation: str,
) -> frozenset[KeptName]:
    """Files of ``dropped`` whose memory the next file of their part may take.

    One of each part of this incarnation that keeps a file: the part saves on. It is the one that
    is spare already, or else the newest that is whole.
    """

    def is_own(kept: KeptName) -> bool:
        return (kept.attempt, kept.incarnation) == (attempt, incarnation)

    gone = set(dropped)
    saving = {kept.part for kept in files if is_own(kept) and kept not in gone}
    best: dict[str, KeptName] = {}
    for kept in sorted(gone, key=lambda kept: (kept.is_spare, kept.step, kept.name)):
        is_whole = kept.is_spare or kept.digest is not None
        if is_own(kept) and is_whole and kept.part in saving:
            best[kept.part] = kept
    return frozenset(best.values())
