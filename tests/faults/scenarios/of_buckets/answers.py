"""Buckets whose answers are lost, refused, cut or stale."""

import time
from collections.abc import Sequence
from typing import Any, Final

from trainsync.api.protocol import SaveState

from tests.faults.in_bucket.proxying import Between, Breach
from tests.faults.in_bucket.scene import CLIENTS, Scene, draw_plan, scene
from tests.faults.plan import Plan
from tests.faults.processes import BrokenError, Child
from tests.faults.scenario import Scenario
from tests.faults.scenarios.of_buckets.killed import REQUESTS, enlarged
from tests.faults.trial import Trial
from tests.store.servers.fault_proxy import Fault

_METHODS: Final = ("GET", "PUT", "POST", "HEAD", "DELETE")
_SLOW: Final = 1_000_000.0
_LASTING: Final = 100_000


def _on(clients: Sequence[str], fault: Fault, what: str, **more: Any) -> list[Breach]:
    method, pattern = REQUESTS[what]
    return [Breach(client, fault, method, pattern, more=more) for client in clients]


def _saved(made: Scene, host: Child, ranks: Child | None, *, commits: bool) -> None:
    """The fault's step with the fault, and the next without."""
    everyone = [child for child in (host, ranks) if child is not None]
    for child in everyone:
        child.tell("fault")
    failed: list[str] = []
    for child in everyone:
        failed += child.expect("saved")
    if commits:
        if failed:
            raise BrokenError(f"a save failed: {failed}")
        host.tell("outcomes")
        for status in host.expect("outcomes").values():
            if status.state is not SaveState.COMMITTED:
                raise BrokenError(f"{status.step} is {status.state}: {status.error}")
    elif failed:
        made.trial.note("the save of the fault failed")
    made.heal()
    for child in everyone:
        child.tell("after")
    for child in everyone:
        child.expect("after")
    made.check()


def _end(made: Scene, host: Child, ranks: Child | None) -> None:
    """Both die, or end in order."""
    if made.trial.dice.random() < 0.5:
        for child in (host, ranks):
            if child is not None:
                child.kill()
        return
    for child in (ranks, host):
        if child is not None:
            made.end(child)


def _go(trial: Trial, plan: Plan, between: Between, *, commits: bool, early: bool) -> None:
    """A job whose bucket answers as ``between`` says, and the next attempt.

    Args:
        commits: whether every save must commit.
        early: whether the fault strikes from the claim on.
    """
    with scene(trial, plan, between) as made:
        if early:
            made.arm()
        host, ranks = made.start()
        if not early:
            made.arm()
        _saved(made, host, ranks, commits=commits)
        _end(made, host, ranks)
        made.check_resumes()


def _reply_lost(trial: Trial) -> None:
    how, _, what = trial.point.partition("/")
    fault = Fault.LOST_REPLY if how == "lost" else Fault.DONE_BUT_500
    plan = draw_plan(trial.seed)
    if what in ("part", "complete"):
        plan = enlarged(plan)
    if what == "delete":
        plan = plan.keeping(1)
    many = {"after": trial.dice.randrange(2), "left": trial.dice.randint(1, 2)}
    between = Between(_on(("host", "ranks"), fault, what, **many))
    _go(trial, plan, between, commits=True, early=trial.dice.random() < 0.5)


_REFUSALS: Final = {
    "expired": (403, "ExpiredToken", ""),
    "denied": (403, "AccessDenied", ""),
    "no_list": (403, "AccessDenied", "list-type"),
    "other_region": (400, "AuthorizationHeaderMalformed", ""),
}


def _refuses(trial: Trial) -> None:
    plan, dice = draw_plan(trial.seed), trial.dice
    clients = ("host", "ranks")
    if trial.point == "throttled":
        _go(trial, enlarged(plan), Between(rate=_SLOW), commits=True, early=False)
        return
    if trial.point in _REFUSALS:
        if dice.random() < 0.25:  # amid an upload of several parts
            plan = enlarged(plan)
        status, code, pattern = _REFUSALS[trial.point]
        more = {"status": status, "code": code, "left": _LASTING, "after": dice.randrange(4)}
        breaches = [
            Breach(client, Fault.REFUSED, method, pattern, more=more)
            for client in clients
            for method in _METHODS
        ]
        _go(trial, plan, Between(breaches), commits=False, early=False)
        return
    status, code = {
        "slow_down": (503, "SlowDown"),
        "internal_error": (500, "InternalError"),
        "too_many": (429, "TooManyRequests"),
        "conflict": (409, "ConditionalRequestConflict"),
    }[trial.point]
    methods, most = _METHODS, 12
    if trial.point == "conflict":  # obstore does not ask again, and the waits between tries double
        methods, most = ("PUT",), 4
    breaches = [
        Breach(
            client,
            Fault.REFUSED,
            method,
            more={
                "status": status,
                "code": code,
                "left": dice.randint(1, most),
                "after": dice.randrange(6),
            },
        )
        for client in clients
        for method in methods
    ]
    _go(trial, plan, Between(breaches), commits=False, early=False)


def _truncates(trial: Trial) -> None:
    what, _, where = trial.point.partition("/")
    plan, dice = draw_plan(trial.seed), trial.dice
    fault = {
        "answer": Fault.TRUNCATED,
        "request": Fault.HALF_SENT,
        "etag": Fault.OTHER_ETAG,
    }[what]
    # Three in a row are given up, and a caller that waits for a commit is told so.
    many = {"after": dice.randrange(4), "left": dice.randint(1, 2)}
    breaches = _on(CLIENTS, fault, where, **many)
    with scene(trial, plan, Between(breaches)) as made:
        made.arm()
        host, ranks = made.start()
        for child in (host, ranks):
            if child is not None:
                child.tell("fault")
        for child in (host, ranks):
            if child is not None:
                child.expect("saved")
        _end(made, host, ranks)
        made.check_resumes(healed=False)


def _stale_list(trial: Trial) -> None:
    """A save that was complete may be missed by the next attempt, which then trains it again."""
    plan = draw_plan(trial.seed)
    if trial.point == "retention":
        plan = plan.keeping(1)
    with scene(trial, plan, Between(lag=0.2 + 2 * trial.dice.random())) as made:
        made.arm()
        host, ranks = made.start()
        everyone = [child for child in (host, ranks) if child is not None]
        for child in everyone:
            child.tell("fault")
        if trial.point == "killed":
            time.sleep(trial.dice.random() * 0.5)  # a fault strikes at any moment
            for child in everyone:
                child.kill()
        else:
            for child in everyone:
                child.expect("saved")
            _end(made, host, ranks)
        made.check_resumes(healed=False, surely=False)


SCENARIOS = (
    Scenario(
        name="bucket_reply_lost",
        broken="the answer to a put that was done is lost, or says 500, so that it is put again",
        holds="every save commits",
        points=tuple(
            f"{how}/{what}"
            for how in ("lost", "failed")
            for what in ("shard", "part", "complete", "record", "receipt", "outcome", "term",
                         "manifest", "pointer", "delete", "put")
        ),
        trial=_reply_lost,
    ),
    Scenario(
        name="bucket_refuses",
        broken="storms of 503, 500, 429 and 409; 1 MB/s; credentials that expire or lack a right",
        holds="commit or abort; when the bucket is well the same attempt goes on",
        points=("slow_down", "internal_error", "too_many", "conflict", "throttled", "expired",
                "denied", "no_list", "other_region"),
        trial=_refuses,
    ),
    Scenario(
        name="bucket_truncates",
        broken="answers or requests that end amid their body, and wrong e-tags",
        holds="nothing torn is committed; the next attempt goes on",
        points=("answer/get", "answer/list", "request/put", "etag/get", "etag/put"),
        trial=_truncates,
    ),
    Scenario(
        name="bucket_stale_list",
        broken="listings are up to 2 s old: what was put is missing, what was removed is there",
        holds="the next attempt resumes at the last commit; no committed object is swept",
        points=("ended", "killed", "retention"),
        trial=_stale_list,
    ),
)  # fmt: skip
