"""The parts of the page, each of one sort of fact, as HTML. Pure.

The script replaces a part when its HTML has changed, so each stands in an element with its name.
"""

from typing import Final

from rich.filesize import decimal

from trainsync.api import words
from trainsync.api.page import News, NewsKind, RunPage, SavePoint
from trainsync.api.status import (
    AccountClass,
    AccountUnit,
    CommittedSave,
    Condition,
    ConditionStatus,
    ExplorerStatus,
    ProofVerdict,
    ServerWeights,
)
from trainsync.monitor.page import timeline_svg
from trainsync.monitor.page.html import (
    ago,
    ahead,
    bar,
    exact,
    facts,
    link,
    name,
    pill,
    table,
    text,
)

_PHASES: Final = {
    "Running": "good",
    "Complete": "good",
    "Failed": "bad",
    "Restarting": "warn",
    "Suspending": "warn",
    "Suspended": "warn",
}
_NEGATIVE: Final = ("Suspended", "Failed")
_METRICS_SHOWN: Final = 8
_EXPLORERS_SHOWN: Final = 12
_SERVERS_SHOWN: Final = 12
_SAVES_SHOWN: Final = 12
_NEWS_SHOWN: Final = 12


def all_sections(page: RunPage) -> dict[str, str]:
    """Every part, by the id of its element."""
    return {
        "head": head(page),
        "notice": notice(page),
        "progress": progress(page),
        "checkpoint": checkpoint(page),
        "timeline": f"<h2>Timeline</h2>{timeline_svg.timeline(page)}{_saves(page)}",
        "weights": weights(page),
        "account": account(page),
        "news": news(page),
        "conditions": conditions(page),
    }


def head(page: RunPage) -> str:
    """The run's name, phase, attempts and duration."""
    attempts = words.attempts(page.attempt, page.restarts, page.infrastructure_restarts)
    ran = ""
    if page.start_time is not None:
        seconds = ((page.completion_time or page.time) - page.start_time).total_seconds()
        said = words.duration(max(int(seconds), 0))
        ran = f", took {said}" if page.completion_time else f", for {said}"
    return (
        f"<h1>{name(page.run)}</h1>{pill(page.phase, _PHASES.get(page.phase, 'calm'))}"
        f'<p class="quiet">{name(page.namespace)} · {attempts}{ran}</p>'
    )


def notice(page: RunPage) -> str:
    """The problems of this page itself."""
    if page.problem is None:
        return ""
    return f'<p class="notice" role="alert">{text(page.problem)}</p>'


def progress(page: RunPage) -> str:
    """Steps, speed and the trainer's metrics."""
    made, at = "<h2>Progress</h2>", page.progress
    if at is None:
        return f'{made}<p class="quiet">The trainer has not reported yet.</p>'
    if at.total_steps:
        fraction = min(at.step / at.total_steps, 1.0)
        label = f"{at.step} of {at.total_steps} steps"
        made += (
            f'<p class="big">{at.step:,}<small> of {at.total_steps:,} steps</small>'
            f'<span class="right">{fraction:.0%}</span></p>{bar(fraction, label)}'
        )
    else:
        made += f'<p class="big">{at.step:,}<small> steps</small></p>'
    rows = []
    if page.completion_time is None:
        if at.steps_per_minute is not None:
            rows.append(("speed", f"{at.steps_per_minute:,.1f} steps a minute"))
        if at.eta is not None and at.eta > page.time:
            rows.append(("done in", ahead(at.eta, page.time)))
        rows.append(("reported", ago(at.last_report_time, page.time)))
    if at.links:
        rows.append(("elsewhere", " · ".join(link(*known) for known in sorted(at.links.items()))))
    made += facts(rows)
    if at.metrics:
        listed = sorted(at.metrics.items())
        made += _metrics(listed[:_METRICS_SHOWN])
        if len(listed) > _METRICS_SHOWN:
            rest = listed[_METRICS_SHOWN:]
            made += _more("metrics", words.counted(len(rest), "more metric"), _metrics(rest))
    return made


def _metrics(listed: list[tuple[str, float]]) -> str:
    cells = "".join(
        f"<div><dt>{name(key)}</dt><dd>{words.value(value)}</dd></div>" for key, value in listed
    )
    return f'<dl class="metrics">{cells}</dl>'


def checkpoint(page: RunPage) -> str:
    """The checkpoint that a restart would resume from, and the open saves."""
    made, at = "<h2>Checkpoint</h2>", page.checkpoint
    if at is None or at.last_committed is None:
        made += '<p class="quiet">Nothing is committed yet.</p>'
    else:
        last = at.last_committed
        made += (
            f'<p class="big"><small>step </small>{last.step:,}'
            f'<small class="right">{ago(last.time, page.time)}</small></p>'
        )
    if at is None:
        return made
    rows = []
    if at.last_committed is not None:
        rows.append(("size", decimal(at.last_committed.bytes)))
        rows.append(("on the volume", words.counted(len(at.retained), "step")))
    if at.last_state_dict is not None:
        rows.append(("state dict", _saved(at.last_state_dict, page)))
    made += facts(rows)
    for save in at.in_flight:
        share = save.receipts / max(save.participants, 1)
        label = f"{save.kind} {save.step}: {save.receipts} of {save.participants} parts"
        made += f'<p class="flight">{text(label.replace("_", " "))}</p>{bar(share, label)}'
    if at.last_error is not None:
        made += f'<p class="error">{text(at.last_error)}</p>'
    return made


def _saved(save: CommittedSave, page: RunPage) -> str:
    return f"step {save.step:,}, {ago(save.time, page.time)}"


def _saves(page: RunPage) -> str:
    if not page.saves:
        return ""
    newest = page.saves[: -_SAVES_SHOWN - 1 : -1]
    rows = [_save_row(save, page) for save in newest]
    listed = table(
        ["step", "saved", "attempt", "size", "committed (UTC)"], rows, numbers=frozenset({0, 2, 3})
    )
    count = len(page.saves) + page.saves_left_out
    what = f"{words.counted(count, 'save')}, the newest {len(newest)} in words"
    return _more("saves", what, f'<div class="wide">{listed}</div>')


def _save_row(save: SavePoint, page: RunPage) -> list[str]:
    kind = save.kind.value.replace("_", " ")
    return [str(save.step), kind, str(save.attempt), decimal(save.bytes), exact(save.time)]


def weights(page: RunPage) -> str:
    """Which version the trainer and each explorer have."""
    made, at = "<h2>Weights</h2>", page.weights
    if at is None:
        return f'{made}<p class="quiet">No Synchronizer has reported yet.</p>'
    rows = [("by", text(at.method))]
    if at.last_duration_seconds is not None:
        rows.append(("last sync", words.duration(at.last_duration_seconds)))
    if at.last_bytes is not None:
        rows.append(("bytes", decimal(at.last_bytes)))
    ways = [
        f"{decimal(size)} {way.replace('_', ' ')}"
        for way, size in page.weights_taken.items()
        if size
    ]
    if ways:
        rows.append(("taken so far", text(", ".join(ways))))
    made += (
        f'<p class="big"><small>version </small>{at.trainer_version:,}'
        f'<small class="right">largest lag {at.lag}</small></p>{facts(rows)}'
    )
    made += _servers(at.servers)
    worst = sorted(at.explorers, key=lambda e: (e.state != "lost", -e.lag, e.id))
    if not worst:
        none = "" if at.servers else '<p class="quiet">No explorer has come yet.</p>'
        return made + none
    made += _explorers(worst[:_EXPLORERS_SHOWN])
    rest = worst[_EXPLORERS_SHOWN:]
    if rest:
        made += _more("explorers", f"{len(rest)} explorers that lag no more", _explorers(rest))
    return made


def _explorers(explorers: list[ExplorerStatus]) -> str:
    rows = []
    for explorer in explorers:
        version = "none" if explorer.version < 0 else f"{explorer.version:,}"
        why = f'<p class="why">{text(explorer.message)}</p>' if explorer.message else ""
        state = pill(explorer.state.replace("_", " "), _kind_of(explorer))
        rows.append([f"{name(explorer.id)}{why}", version, str(explorer.lag), state])
    return table(["explorer", "version", "lag", "state"], rows, numbers=frozenset({1, 2}))


def _servers(servers: list[ServerWeights]) -> str:
    rows = []
    for server in sorted(servers, key=lambda s: (s.ready, -s.lag, s.name))[:_SERVERS_SHOWN]:
        version = "none" if server.version < 0 else f"{server.version:,}"
        why = f'<p class="why">{text(server.message)}</p>' if server.message else ""
        refuted = server.verdict is ProofVerdict.REFUTED
        state = "refuted" if refuted else "ready" if server.ready else "not ready"
        kind = "bad" if refuted else "good" if server.ready else "warn"
        proof = server.verdict.value if server.verdict is not None else "none yet"
        rows.append(
            [f"{name(server.name)}{why}", version, str(server.lag), proof, pill(state, kind)]
        )
    if not rows:
        return ""
    made = table(["server", "version", "lag", "proof", "state"], rows, numbers=frozenset({1, 2}))
    left = len(servers) - len(rows)
    return made + (f'<p class="quiet">and {left} more</p>' if left else "")


def _kind_of(explorer: ExplorerStatus) -> str:
    if explorer.state == "lost":
        return "bad"
    return "warn" if explorer.message or explorer.state != "running" else "good"


def account(page: RunPage) -> str:
    """GPU-seconds of the run by class."""
    made, at = "<h2>Account</h2>", page.account
    if at is None:
        return f'{made}<p class="quiet">Nothing is accounted for yet.</p>'
    rows = []
    for kind in AccountClass:
        if any(kind.value in role.classes for role in at.roles):
            cells = (_spent(role.classes.get(kind.value), role.seconds) for role in at.roles)
            rows.append([kind.value, *cells])
    whose = "GPUs" if at.unit is AccountUnit.GPU else "pods"
    listed = table(
        ["class", *(role.role for role in at.roles)],
        rows,
        numbers=frozenset(range(1, len(at.roles) + 1)),
    )
    return (
        f'{made}<p class="big">{at.goodput:.1%}<small> goodput</small></p>{listed}'
        f'<p class="quiet">Of the seconds of {whose}.</p>'
    )


def _spent(seconds: int | None, of: int) -> str:
    return "" if seconds is None else f"{seconds / max(of, 1):.1%}"


def news(page: RunPage) -> str:
    """Faults and recoveries, the newest first."""
    since = f'<p class="quiet">As this monitor saw it, since {exact(page.since)} UTC.</p>'
    if not page.news:
        return f'<h2>What happened</h2><p class="none">No fault.</p>{since}'
    newest = page.news[::-1]
    made = _news_list(newest[:_NEWS_SHOWN], page)
    rest = newest[_NEWS_SHOWN:]
    if rest:
        made += _more("news", f"{len(rest)} older", _news_list(rest, page))
    return f"<h2>What happened</h2>{made}{since}"


def _news_list(listed: list[News], page: RunPage) -> str:
    return f'<ul class="news">{"".join(_news_item(item, page) for item in listed)}</ul>'


def _news_item(item: News, page: RunPage) -> str:
    mark = {NewsKind.FAULT: "▲", NewsKind.RECOVERY: "✓", NewsKind.PLAIN: "·"}[item.kind]
    times = f" ({item.count} times)" if item.count > 1 else ""
    return (
        f'<li class="{item.kind.value}"><span class="mark" aria-hidden="true">{mark}</span>'
        f"<span>{text(item.text)}{times} <small>{ago(item.time, page.time)}</small></span></li>"
    )


def conditions(page: RunPage) -> str:
    """The run's conditions, as ``kubectl describe`` has them."""
    if not page.conditions:
        return '<h2>Conditions</h2><p class="quiet">The operator has written none yet.</p>'
    rows = []
    for found in page.conditions:
        why = f"{found.reason}: {found.message}" if found.message else found.reason
        rows.append(
            [
                f"{text(found.type.value)} {pill(found.status.value, _health(found, page))}",
                f'{text(why)} <small class="quiet">{ago(found.last_transition_time, page.time)}'
                "</small>",
            ]
        )
    return "<h2>Conditions</h2>" + table(["condition", "why"], rows, numbers=frozenset())


def _health(found: Condition, page: RunPage) -> str:
    true = found.status is ConditionStatus.TRUE
    if found.type.value in _NEGATIVE:
        return "bad" if true else "calm"
    if true:
        return "good"
    quiet = found.status is ConditionStatus.UNKNOWN or page.completion_time is not None
    return "calm" if quiet or found.type.value == "Complete" else "warn"


def _more(key: str, what: str, inside: str) -> str:
    return f'<details data-key="{key}"><summary>{text(what)}</summary>{inside}</details>'
