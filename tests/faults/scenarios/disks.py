"""Disks that are full, read-only or slow."""

import os
import signal
import stat
import time
from typing import Final

from trainsync.api.protocol import SaveState

from tests.faults.inject import Ballast, Slow, small_volume
from tests.faults.obeying import Faulty
from tests.faults.plan import Plan, draw
from tests.faults.processes import BrokenError, Child, become_nobody
from tests.faults.scenario import Scenario
from tests.faults.scenarios.common import end_all, go_on, start
from tests.faults.trial import Trial

_PAGE: Final = 4096
_VOLUME_BYTES: Final = 4 << 20
_VOLUME_FILES: Final = 600
_NOBODY: Final = 65534


def _strike(trial: Trial, children: list[Child]) -> None:
    """Save the step of the fault, and count the result.

    From now on a receipt may lack its file: an abort that cannot be recorded removes both.
    """
    for child in children:
        child.tell("fault")
    failed = [error for child in children for error in child.expect("saved")]
    trial.receipts_hold = False
    trial.note("the trainer was told of a failure" if failed else "the trainer saw no failure")


def _recovers(trial: Trial, plan: Plan, children: list[Child]) -> None:
    """The disk works again: the same attempt continues, and so does the next."""
    go_on(children)
    end_all(children)
    trial.check_resumes(plan, last=(plan.fault, plan.after))


def _full(trial: Trial) -> None:
    plan = draw(trial.seed, largest=2_000)
    with small_volume(trial.run.root, _VOLUME_BYTES, _VOLUME_FILES):
        children = start(trial, trial.attempt(plan), plan, Faulty())
        trial.maybe_read()
        saves = sum(len(plan.participants(plan.fault, kind)) for kind in plan.fault.shape.kinds)
        ballast = Ballast(trial.run.root)
        if trial.point == "bytes":
            # Up to slightly more than the step needs: pages of shards and of small records.
            pages = trial.dice.randint(0, 4 * saves + 10)
            ballast.fill(pages * _PAGE, _VOLUME_FILES)
        else:
            ballast.fill(_VOLUME_BYTES, trial.dice.randint(0, 2 * saves + 20))
        _strike(trial, children)
        trial.check(plan)
        ballast.empty()
        _recovers(trial, plan, children)
        trial.end()


def _read_only(trial: Trial) -> None:
    plan = draw(trial.seed, least_history=1)
    where = trial.attempt(plan)
    is_root = os.geteuid() == 0
    if is_root:
        for directory in (trial.directory, trial.run.root):
            os.chown(directory, _NOBODY, _NOBODY)
    as_nobody = Faulty(start=become_nobody) if is_root else Faulty()
    children = start(trial, where, plan, as_nobody, as_nobody)
    run, owner = trial.run, where.owner
    target = {
        "run": run.root,
        "staging": run.staging,
        "owner": run.owner(owner.attempt, owner.incarnation),
        "internal": run.trash.parent,
        "claims": run.claims,
    }[trial.point]
    mode = stat.S_IMODE(target.stat().st_mode)
    target.chmod(0o555)
    _strike(trial, children)
    trial.check(plan)
    target.chmod(mode)
    _recovers(trial, plan, children)


def _slow(trial: Trial) -> None:
    plan = draw(trial.seed)
    hooks = [Slow(trial.seed, trial.dice.choice((0.005, 0.03))) for _ in range(2)]

    def arm() -> None:
        for hook in hooks:
            hook.armed = True

    faulty = Faulty(write=hooks[0], monitor=hooks[1], arm=arm, heal=lambda: None)
    children = start(trial, trial.attempt(plan), plan, faulty, faulty)
    trial.maybe_read()
    if trial.point == "killed":
        for child in children:
            child.tell("fault")
        time.sleep(trial.dice.random() * 0.2)
        for child in trial.dice.sample(children, len(children)):
            child.signal(signal.SIGKILL)
        for child in children:
            child.wait()
        trial.check_resumes(plan)
        return
    for child in children:
        child.tell("fault")
    for child in children:
        if failed := child.expect("saved"):
            raise BrokenError(f"a slow disk made a save fail: {failed}")
    children[0].tell("outcomes")
    for kind, status in children[0].expect("outcomes").items():
        if status.state is not SaveState.COMMITTED:
            raise BrokenError(f"{kind} is {status.state}: {status.error}")
    _recovers(trial, plan, children)


SCENARIOS = (
    Scenario(
        name="disk_full",
        broken="a volume (tmpfs) filled up to a random rest, of bytes or of files, at a save",
        holds="the save commits or aborts; with space again the same attempt goes on",
        points=("bytes", "files"),
        trial=_full,
        needs_root="mounting a tmpfs needs root",
    ),
    Scenario(
        name="read_only",
        broken="a directory of the run becomes read-only for a save, for a user that is not root",
        holds="the save commits or aborts; when it can be written again the same attempt goes on",
        points=("run", "staging", "owner", "internal", "claims"),
        trial=_read_only,
    ),
    Scenario(
        name="slow_disk",
        broken="delays at every phase of writers and monitor; without and with a kill -9",
        holds="without a kill everything commits; with one, what was complete",
        points=("kept", "killed"),
        trial=_slow,
    ),
)
