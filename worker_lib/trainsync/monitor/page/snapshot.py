"""One look at a run, put together from what the monitor and the API server know. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from pydantic import ValidationError

from trainsync.api.page import AttemptStart, News, RunPage, SavePoint
from trainsync.api.status import Condition, Phase
from trainsync.monitor.core.views import CoreView, with_servers
from trainsync.storage.saves.claims import Claim

_SAVES_KNOWN: Final = 20_000
_SAVES_LISTED: Final = 2000
_ATTEMPTS_LISTED: Final = 200


@dataclass(frozen=True)
class Identity:
    """Which run a page is of, and since when its monitor has watched."""

    run: str
    namespace: str
    uid: str
    since: datetime


@dataclass(frozen=True)
class Sources:
    """The data of a page. ``status`` is the run's, raw, as the API server has it."""

    status: Mapping[str, Any]
    view: CoreView | None
    committed: Iterable[SavePoint]
    witnessed: Iterable[SavePoint]
    """Commits that the monitor saw; retention may have removed them since."""
    claims: Iterable[Claim]
    news: list[News]
    problem: str | None


def build(identity: Identity, sources: Sources, now: datetime) -> RunPage:
    """The page at ``now``."""
    status, view = sources.status, sources.view
    known = {(s.kind, s.step, s.attempt): s for s in (*sources.witnessed, *sources.committed)}
    saves = sorted(known.values(), key=lambda save: (save.time, save.step, save.kind))
    attempts = [
        AttemptStart(attempt=claim.attempt, cluster=claim.cluster, time=claim.created_at)
        for claim in sources.claims
    ]
    return RunPage(
        run=identity.run,
        namespace=identity.namespace,
        uid=identity.uid,
        time=now,
        since=identity.since,
        problem=sources.problem,
        phase=str(status.get("phase") or Phase.PENDING.value),
        attempt=int(status.get("attempt") or 0),
        restarts=int(status.get("restarts") or 0),
        infrastructure_restarts=int(status.get("infrastructureRestarts") or 0),
        start_time=_time(status.get("startTime")),
        completion_time=_time(status.get("completionTime")),
        conditions=_conditions(status),
        progress=view.progress if view is not None else None,
        checkpoint=view.checkpoint if view is not None else None,
        weights=with_servers(view.weights, view.servers) if view is not None else None,
        weights_taken=dict(view.weights_taken) if view is not None else {},
        account=view.account if view is not None else None,
        attempts=attempts[-_ATTEMPTS_LISTED:],
        saves=saves[-_SAVES_KNOWN:],
        saves_left_out=max(len(saves) - _SAVES_KNOWN, 0),
        news=sources.news,
    )


def listed(page: RunPage) -> RunPage:
    """The page for programs: of very many saves it lists the newest."""
    out = max(len(page.saves) - _SAVES_LISTED, 0)
    left = {"saves": page.saves[out:], "saves_left_out": page.saves_left_out + out}
    return page.model_copy(update=left) if out else page


def same(a: RunPage, b: RunPage) -> bool:
    """Whether they say the same, but for the time at which they were made."""
    return a == b.model_copy(update={"time": a.time})


def _conditions(status: Mapping[str, Any]) -> list[Condition]:
    found = []
    for raw in status.get("conditions") or []:
        try:
            found.append(Condition.model_validate(raw, extra="ignore"))
        except ValidationError:
            continue  # of a newer operator: the page leaves out what it cannot name
    return found


def _time(text: Any) -> datetime | None:
    return None if text is None else datetime.fromisoformat(str(text))
