"""Ranks, which keep their shards and take their neighbours' copies, lost amid training; and those
of an older attempt that live on."""

import signal
import time

from trainsync import failpoints
from trainsync.checkpoint.memory.neighbour import roster
from trainsync.checkpoint.memory.neighbour.neighbour import Neighbour
from trainsync.checkpoint.memory.neighbour.roster import CopyHolder
from trainsync.storage.layout import RunDirectory

from tests.faults.inject import stop_me
from tests.faults.memory.promises import Tier
from tests.faults.memory.rank import killing
from tests.faults.memory.scene import Attempt, Scene, Tiers, scene
from tests.faults.processes import BrokenError
from tests.faults.scenario import Scenario
from tests.faults.scenarios.of_memory.common import APART, PODS, check_survivors, from_memory
from tests.faults.trial import Trial

_OLDER_SECONDS = 20.0


def _killed(trial: Trial) -> None:
    if trial.point == "stopped_amid_a_copy":
        _stopped(trial)
        return
    pods = trial.dice.choice(PODS)
    all_of_them = trial.point.startswith("all")
    with scene(trial, copies=trial.dice.randint(0, 1), pods=pods) as made:
        attempt = made.first()
        victim = trial.dice.randrange(len(pods))
        for child in attempt.ranks:
            child.tell(f"save {made.next()}")
        time.sleep(trial.dice.random() * 0.3)  # the fault strikes at any moment of a save
        if not all_of_them:
            attempt.ranks[victim].kill()
            if trial.dice.random() < 0.5:
                check_survivors(attempt, victim)
        attempt.kill()
        known: Tiers = from_memory(pods)
        later = known
        if trial.point.endswith("pod"):
            known = made.lose(pods[victim])
            later = {rank: some for rank, some in known.items() if some != (Tier.NEIGHBOUR,)}
        elif trial.point.endswith("pods"):
            known = later = made.lose(*set(pods))
        made.goes_on(known, later=later)


def _stopped(trial: Trial) -> None:
    """A rank that stands still while it takes a copy; it goes on, and the step commits."""
    pods = trial.dice.choice(APART)
    victim = trial.dice.randrange(len(pods))
    strike = killing(failpoints.NEIGHBOUR, "taking", 1, stop_me)
    with scene(trial, copies=1, pods=pods) as made:
        attempt = made.first(at_arm={victim: strike})
        attempt.ranks[victim].tell("arm")
        step = made.next()
        for child in attempt.ranks:
            child.tell(f"save {step}")
        child = attempt.ranks[victim]
        if not child.wait_stopped():
            raise BrokenError(f"{child.name} was not stopped: it ended with {child.status}")
        check_survivors(attempt, victim)
        child.signal(signal.SIGCONT)
        child.expect("saved")
        attempt.ranks[0].tell(f"commit {step}")
        attempt.ranks[0].expect("committed")
        made.committed = step
        attempt.kill()
        made.goes_on(from_memory(pods))


def _older(trial: Trial) -> None:
    """The older attempt reaches its volume, and no monitor."""
    pods = trial.dice.choice(APART)
    reused = trial.point == "address_reused"
    copies = 1 if reused else trial.dice.randint(0, 1)
    with scene(trial, copies=copies, pods=pods) as made:
        at_arm = {rank: lambda: _send_to_newer(made) for rank in range(len(pods))}
        older = made.first(at_arm=at_arm if reused else None)
        older.monitor.kill()
        known = from_memory(pods)
        if trial.point != "same_pods":
            made.move([pod + len(pods) for pod in pods])
            known = dict.fromkeys(known, (Tier.VOLUME,))
        first = made.next()
        for child in older.ranks:
            child.tell("arm")
            child.tell(f"save {first}")

        def amid(_: Attempt) -> None:
            for child in older.ranks:
                child.expect("saved")
                child.tell(f"save {first + 100}")
                child.expect("saved")
                child.tell("written")
                child.expect("written")
                child.tell("copied")
                child.expect("copied")
            if reused:
                _check_refused(made, older)
            older.kill()

        made.goes_on(known, later=known, exact=trial.point != "same_pods", amid=amid)


def _send_to_newer(made: Scene) -> None:
    """Let this process find the next attempt's ranks at the addresses of its own."""
    run = RunDirectory(made.trial.run.root)
    attempt, incarnation = 1, f"incarnation1{made.trial.seed % 10**9}"

    def partners(_: Neighbour, own: CopyHolder) -> list[CopyHolder]:
        found: list[CopyHolder] = []
        end = time.monotonic() + _OLDER_SECONDS
        while not found and time.monotonic() < end:
            found = roster.read(run, attempt, incarnation)
            time.sleep(0.05)  # polling interval
        return [holder for holder in found if holder.id != own.id]

    # No setting gives a rank the partners of another attempt.
    Neighbour._partners = partners  # type: ignore[method-assign]


def _check_refused(made: Scene, older: Attempt) -> None:
    if not sum(int(str(count)) for count in older.all("refused", "refused")):
        raise BrokenError("the older attempt's ranks sent no copy to the newer's, or none refused")
    for pod in set(made.pods):
        guests = made.place_of(pod).guests
        assert guests is not None
        strangers = [kept.name for kept in guests.files() if kept.attempt == 0]
        if strangers:
            raise BrokenError(
                f"the newer attempt's pod {pod} took copies of the older: {strangers}"
            )


SCENARIOS = (
    Scenario(
        name="keeper_killed",
        broken="kill -9 or SIGSTOP of ranks that keep shards and copies, also with their pods",
        holds="own memory serves, else the neighbour's, else the volume; nobody waits for the dead",
        points=("one", "one_with_its_pod", "all", "all_with_their_pods", "stopped_amid_a_copy"),
        trial=_killed,
    ),
    Scenario(
        name="older_keeper",
        broken="an older attempt's ranks keep and copy shards, cut off from the monitor",
        holds="the newer attempt loads the last commit, and none of its pods takes an older copy",
        points=("same_pods", "other_pods", "address_reused"),
        trial=_older,
    ),
)
