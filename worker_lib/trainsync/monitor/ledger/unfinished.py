"""Saves that are open when their monitor ends."""

from collections.abc import Collection, Iterable
from typing import Final

from trainsync.monitor.ledger.saves import Save

_SHOWN: Final = 5


def awaited(saves: Iterable[Save], ranks: Collection[int]) -> list[Save]:
    """The saves that may still commit when ``ranks`` write nothing any more."""
    return [
        save
        for save in saves
        if save.registration is not None
        and not any(participant.rank in ranks for participant in save.missing)
    ]


def described(saves: Iterable[Save]) -> str:
    """Describe open saves and their missing receipts; empty when there is none."""
    return "; ".join(f"{save.key}, {_lacks(save)}" for save in saves)


def _lacks(save: Save) -> str:
    if save.registration is None:
        return "not registered"
    if not save.missing:
        return "its files are not promoted yet"
    names = sorted(map(str, save.missing))
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"lacks {', '.join(names[:_SHOWN])}{more}"
