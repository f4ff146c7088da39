"""An older attempt that keeps running beside the newer one."""

import signal
import time
from collections.abc import Sequence
from pathlib import Path

from trainsync.api.protocol import SaveKind
from trainsync.storage.saves import manifest

from tests.faults.cluster import Cluster, FailoverClient, client_of
from tests.faults.inject import At, stop_me
from tests.faults.kube import CLUSTER, Place
from tests.faults.obeying import Faulty, hosting
from tests.faults.plan import STRIDE, Plan, Shape, Step, draw
from tests.faults.processes import BrokenError, Line
from tests.faults.scenario import Scenario
from tests.faults.scenarios.common import COMMIT_PHASES
from tests.faults.training import Trainer, Where, host
from tests.faults.trial import Trial


def _older(
    line: Line, where: Where, plan: Plan, places: Sequence[Place], token: Path, *, cut: bool
) -> None:
    """An attempt that keeps running and saving after a newer one has claimed."""
    client = FailoverClient([client_of(place, where, token) for place in places])
    client.claim(CLUSTER)
    trainer = Trainer(where, plan, client, range(plan.ranks))  # type: ignore[arg-type]
    trainer.train(plan.history)
    line.say("history")
    line.hear()
    if cut:
        client.cut()
    line.say("begun")
    failed = trainer.try_to_save(plan.fault) + trainer.try_to_save(plan.after)
    line.say("saved", failed)
    line.hear()


def _newer(line: Line, where: Where, plan: Plan, places: Sequence[Place], token: Path) -> None:
    """The next attempt: claims, resumes, and commits two steps."""
    client = FailoverClient([client_of(place, where, token) for place in places])
    client.claim(CLUSTER)
    point = client.resume()
    line.say("claimed", None if point is None else point.step)
    number = int(line.hear())
    trainer = Trainer(where, plan, client, range(plan.ranks))  # type: ignore[arg-type]
    trainer.train([Step(number, Shape.CHECKPOINT), Step(number + STRIDE, Shape.CHECKPOINT)])
    line.say("trained")
    client.close()


def _two_attempts(trial: Trial) -> None:
    plan = draw(trial.seed, split=False)
    cluster = Cluster(trial, plan)
    place = Place.choose("monitor-a")
    monitor = cluster.monitor(place)
    place.wait_ready(trial.watch.look)
    cut = trial.point == "behind_a_cut_network"

    def older_job(line: Line) -> None:
        _older(line, cluster.where, plan, [place], cluster.token, cut=cut)

    older = trial.child("older attempt", older_job)
    older.expect("history")
    trial.maybe_read()
    older.tell("go")
    older.expect("begun")
    time.sleep(trial.dice.random() * 0.05)
    cluster.api.set_attempt(1)
    where = trial.attempt(plan)
    newer = trial.child("newer attempt", _newer, where, plan, [place], cluster.token)
    resumed = newer.expect("claimed")
    before = trial.check(plan)
    pointed = max(before[SaveKind.CHECKPOINT], default=None)
    if resumed != pointed:
        raise BrokenError(f"the newer attempt resumes at {resumed}, committed is {pointed}")
    number = max((n for numbers in before.values() for n in numbers), default=0) + STRIDE
    for step in (number, number + STRIDE):
        trial.steps[1, step] = Step(step, Shape.CHECKPOINT)
    newer.tell(str(number))
    newer.expect("trained")
    failed = older.expect("saved", 60)
    trial.note("the older attempt was told" if failed else "the older attempt noticed nothing")
    _check_newer_only(trial, before, trial.check(plan))
    older.tell("end")
    older.wait()
    monitor.signal(signal.SIGTERM)
    if monitor.wait() != 0:
        raise BrokenError(f"the monitor ended with {monitor.status} after SIGTERM")
    trial.check_resumes(plan, last=())


def _newer_local(line: Line, where: Where, plan: Plan) -> None:
    """Like `_newer`, with the monitor in its own process."""
    client = host(where, plan)
    point = client.resume()
    line.say("claimed", None if point is None else point.step)
    number = int(line.hear())
    trainer = Trainer(where, plan, client, range(plan.ranks))
    trainer.train([Step(number, Shape.CHECKPOINT), Step(number + STRIDE, Shape.CHECKPOINT)])
    client.close()
    line.say("trained")


def _two_local(trial: Trial) -> None:
    """The scenario on a local directory, where each attempt has its own monitor."""
    plan = draw(trial.seed, split=False)
    hook = At(trial.dice.choice(COMMIT_PHASES), 1, stop_me)
    stops = trial.point == "woken_up"
    faulty = Faulty(monitor=hook, arm=lambda: setattr(hook, "armed", stops))
    older = trial.child(
        "older attempt", hosting, trial.attempt(plan), plan, list(range(plan.ranks)), faulty
    )
    older.expect("history")
    trial.maybe_read()
    older.tell("fault")
    if stops:
        if not older.wait_stopped():
            raise BrokenError(f"the older attempt was not stopped: it ended with {older.status}")
    else:
        time.sleep(trial.dice.random() * 0.05)
    newer = trial.child("newer attempt", _newer_local, trial.attempt(plan), plan)
    newer.expect("claimed")
    before = trial.check(plan)
    number = max((n for numbers in before.values() for n in numbers), default=0) + STRIDE
    for step in (number, number + STRIDE):
        trial.steps[1, step] = Step(step, Shape.CHECKPOINT)
    newer.tell(str(number))
    later = stops and trial.dice.random() < 0.5
    if later:
        newer.expect("trained")
    older.signal(signal.SIGCONT)
    older.tell("again")  # the older attempt keeps saving
    if not later:
        newer.expect("trained")
    older.expect("saved", 60)
    older.expect("again", 60)
    _check_newer_only(trial, before, trial.check(plan))
    older.tell("end")
    older.wait()
    _check_newer_only(trial, before, trial.check(plan))
    trial.check_resumes(plan, last=())


def _check_newer_only(
    trial: Trial, before: dict[SaveKind, list[int]], after: dict[SaveKind, list[int]]
) -> None:
    """Check that all commits since ``before`` are of the newer attempt."""
    for kind, numbers in after.items():
        for new in set(numbers) - set(before[kind]):
            record = manifest.read_manifest(trial.run, kind, new).manifest
            if record.attempt != 1:
                raise BrokenError(
                    f"{kind} {new} was committed by attempt 0 after attempt 1 claimed"
                )


SCENARIOS = (
    Scenario(
        name="two_attempts",
        broken="an older attempt that lives on, with or without a network, when a newer one claims",
        holds="nothing of the older attempt is committed any more, the newer one trains on",
        points=("side_by_side", "behind_a_cut_network"),
        trial=_two_attempts,
        faults=2,
    ),
    Scenario(
        name="two_local_attempts",
        broken="the same on a plain directory: two monitors at once, the older one may sleep amid",
        holds="nothing of the older attempt is committed any more, the newer one trains on",
        points=("side_by_side", "woken_up"),
        trial=_two_local,
    ),
)
