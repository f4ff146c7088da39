"""An attempt in a bucket that lives on beside the next one, and buckets that are emptied."""

import time
from pathlib import Path
from typing import Final

from tests.faults.in_bucket.promises import BucketWatch
from tests.faults.in_bucket.proxying import Between, Breach
from tests.faults.in_bucket.scene import Scene, draw_plan, scene
from tests.faults.plan import STRIDE
from tests.faults.processes import BrokenError, Child
from tests.faults.scenario import Scenario
from tests.faults.scenarios.of_buckets.killed import REQUESTS
from tests.faults.trial import Trial
from tests.store.servers.fault_proxy import Fault

_LATE: Final = (
    "shard", "record", "receipt", "outcome", "mark", "term", "manifest", "pointer", "delete",
)  # fmt: skip


def _two_attempts(trial: Trial) -> None:
    """The older attempt's request at the point is held until the newer one has claimed, or longer;
    the older one has died at it, or asks again and lives on."""
    plan, dice = draw_plan(trial.seed), trial.dice
    dies = dice.random() < 0.5
    breaches = []
    if trial.point != "side_by_side":
        what = trial.point.removeprefix("late_")
        method, pattern = REQUESTS[what]
        if what == "delete":
            plan = plan.keeping(1)
        more = {"after": 1} if what == "manifest" else {}  # the put before it is of the mark
        breaches = [Breach("host", Fault.HELD, method, pattern, kills=dies, more=more)]
    with scene(trial, plan, Between(breaches)) as made:
        host, ranks = made.start()
        older = [child for child in (host, ranks) if child is not None]
        made.arm()
        for child in older:
            child.tell("fault")
        if breaches:
            made.wait_struck(host)
        else:
            time.sleep(dice.random() * 0.3)  # the claim comes at any moment
        if breaches and dies:
            host.kill()  # also one that did not come to the point
            if ranks is not None:
                ranks.kill()
        newer = made.start_next()
        resumed = newer.expect("resumed")
        before = made.check()
        if resumed != max(before, default=None):
            raise BrokenError(f"the newer attempt resumes at {resumed}, committed are {before}")
        early = dice.random() < 0.5
        if early:
            made.release()
        step = made.train(newer, (resumed or 0) + STRIDE)
        if not early:
            made.release()
        _see_out(made, older, dies=bool(breaches) and dies)
        made.quiet()
        newest = made.reading.manifests()
        strangers = [m for m in newest if m.step not in before and m.owner != trial.owners[-1]]
        if strangers:
            raise BrokenError(f"of an older attempt was committed after a newer claim: {strangers}")
        made.check_swept(step)
        made.end(newer)


def _see_out(made: Scene, older: list[Child], *, dies: bool) -> None:
    if dies:
        return
    failed = [error for child in older for error in child.expect("saved", 120)]
    made.trial.note("the older attempt was told" if failed else "the older attempt had saved")
    for child in older:
        child.kill()


def _emptied(trial: Trial) -> None:
    plan, dice = draw_plan(trial.seed, least_history=1), trial.dice
    with scene(trial, plan, Between()) as made:
        host, ranks = made.start()
        older = [child for child in (host, ranks) if child is not None]
        for child in older:
            child.tell("fault")
        time.sleep(dice.random() * 0.2)  # at any moment of its save
        watch = trial.watch
        assert isinstance(watch, BucketWatch)
        watch.is_off = True
        gone = _empty(made.reading.root, trial.point)
        for child in older:
            child.expect("saved", 120)
            child.kill()
        made.quiet()
        _check_new(made, gone)
        whole = {m.step for m in made.reading.manifests() if made.is_whole(m)}
        left = bool(made.reading.manifests()) or made.reading.pointer() is not None
        newer = made.start_next()
        said, value = newer.listen()
        if said == "refused":
            if not left:
                raise BrokenError(f"nothing was left, and the next attempt is refused: {value}")
            trial.note("the next attempt was refused")
            return
        if said != "resumed":
            raise BrokenError(f"the next attempt said {said!r}: {value}")
        if value is None and left:
            raise BrokenError("the next attempt begins anew, and something was committed")
        if value is not None and value not in whole | {plan.fault.number}:
            raise BrokenError(f"the next attempt resumes at {value}, whole are {whole}")
        trial.note("the next attempt began anew" if value is None else "it resumed")
        made.train(newer, max([value or 0, *whole]) + STRIDE)
        _check_new(made, gone)
        newer.kill()


def _empty(root: Path, what: str) -> set[str]:
    """Remove objects; their keys."""
    folders = {"all": "", "objects": "objects", "manifests": "manifests", "run": "run"}
    if what == "pointer":
        found = [root / "latest_checkpointed_iteration.txt"]
    elif what == "newest":
        steps = sorted((root / "objects").iterdir(), key=lambda path: int(path.name.split("_")[-1]))
        found = [path for path in steps[-1].rglob("*") if path.is_file()]
    else:
        found = [path for path in (root / folders[what]).rglob("*") if path.is_file()]
    for path in found:
        path.unlink(missing_ok=True)
    return {path.relative_to(root).as_posix() for path in found}


def _check_new(made: Scene, gone: set[str]) -> None:
    """Check that what was committed since names nothing that is missing, but what was removed."""
    for manifest in made.reading.manifests():
        if not manifest.keys & gone and not made.is_whole(manifest):
            raise BrokenError(f"step {manifest.step} is committed, and is not whole")


SCENARIOS = (
    Scenario(
        name="bucket_two_attempts",
        broken="an older attempt lives on beside a newer one, or its last request comes late",
        holds="nothing of the older attempt is committed after the claim; its objects go",
        points=("side_by_side", *(f"late_{what}" for what in _LATE)),
        trial=_two_attempts,
    ),
    Scenario(
        name="bucket_emptied",
        broken="all, or a part, of a run's objects are removed under it",
        holds="no commit names what is gone; the next attempt resumes from what is whole, or says",
        points=("all", "objects", "newest", "manifests", "pointer", "run"),
        trial=_emptied,
    ),
)
