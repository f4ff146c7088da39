"""Which explorers were lost, refused a version or came back between two looks, in words. Pure."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from trainsync.api.status import ExplorerStatus

_NAMED: Final = 4
_LOST: Final = "lost"


@dataclass(frozen=True)
class ExplorerChanges:
    """A sentence for each sort of change; None where there was none."""

    lost: str | None
    refused: str | None
    back: str | None


def between(
    before: Mapping[str, ExplorerStatus], now: Mapping[str, ExplorerStatus]
) -> ExplorerChanges:
    """The changes from ``before`` to ``now``, both by id."""
    lost = [e for e in now.values() if _is_new(e, before, _lost)]
    back = [e for e in now.values() if not _lost(e) and _lost(before.get(e.id))]
    refused = [e for e in now.values() if not _lost(e) and _is_new(e, before, _refuses)]
    return ExplorerChanges(
        lost=_sentence(lost, "is lost", "are lost", why=True),
        refused=_sentence(refused, "refused a version", "refused a version", why=True),
        back=_sentence(back, "is back", "are back", why=False),
    )


def _sentence(explorers: list[ExplorerStatus], one: str, many: str, *, why: bool) -> str | None:
    if not explorers:
        return None
    if len(explorers) == 1:
        because = f": {explorers[0].message}" if explorers[0].message and why else ""
        return f"Explorer {explorers[0].id} {one}{because}."
    return f"{len(explorers)} explorers {many}: {_some(e.id for e in explorers)}."


def _lost(explorer: ExplorerStatus | None) -> bool:
    return explorer is not None and explorer.state == _LOST


def _refuses(explorer: ExplorerStatus | None) -> bool:
    return explorer is not None and explorer.state != _LOST and explorer.message is not None


def _is_new(
    explorer: ExplorerStatus,
    before: Mapping[str, ExplorerStatus],
    holds: Callable[[ExplorerStatus | None], bool],
) -> bool:
    return holds(explorer) and not holds(before.get(explorer.id))


def _some(ids: Iterable[str]) -> str:
    named = list(ids)
    more = f" and {len(named) - _NAMED} more" if len(named) > _NAMED else ""
    return ", ".join(named[:_NAMED]) + more
