"""The conductor of a trial in a bucket: starts the processes, and checks at the end."""

import random
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from tests.faults.in_bucket import promises
from tests.faults.in_bucket.processes import (
    InBucket,
    hosting,
    joined,
    next_attempt,
    served,
    serving,
)
from tests.faults.in_bucket.promises import BucketWatch, Reading
from tests.faults.in_bucket.proxying import Between, proxying
from tests.faults.in_bucket.server import the_server
from tests.faults.kube import Place
from tests.faults.obeying import Faulty
from tests.faults.plan import STRIDE, Plan, Shape, Step, draw
from tests.faults.processes import BrokenError, Child
from tests.faults.trial import Trial

CLIENTS: Final = ("host", "ranks", "next")
ORPHANS_SECONDS: Final = 15.0
"""Within them the sweeps of an attempt have removed what attempts before it left."""

_PREFIXES: Final = ("runs/a", "a b/c+d", "größe/50%25", "it's&~(x)", "=;,@:$!", "x")
_TURN: Final = 0.02


def draw_plan(seed: int, **given: Any) -> Plan:
    """A plan of checkpoints alone: nothing else is saved into a bucket. In half of those of several
    components some are frozen."""
    plan = draw(seed, shape=Shape.CHECKPOINT, **given)
    history = tuple(replace(step, shape=Shape.CHECKPOINT) for step in plan.history)
    dice = random.Random(f"frozen {seed}")
    frozen = plan.components[1:] if dice.random() < 0.5 else ()
    return replace(plan, history=history, frozen=frozen)


@contextmanager
def scene(trial: Trial, plan: Plan, between: Between) -> Iterator["Scene"]:
    """A scene in a bucket of its own, which goes with it; a broken trial keeps a copy."""
    name = f"bucket-{secrets.token_hex(8)}"
    files = the_server().bucket(name)
    try:
        yield Scene(trial, plan, between, name)
    except BaseException:
        with suppress(shutil.Error):  # what a live process removes meanwhile
            shutil.copytree(files, trial.directory / "bucket")
        raise
    finally:
        trial.end()
        shutil.rmtree(files, ignore_errors=True)  # a request may be on its way


class Scene:
    """A run in the bucket ``name``, and the proxy before it."""

    def __init__(self, trial: Trial, plan: Plan, between: Between, name: str) -> None:
        self.trial = trial
        self.plan = plan
        prefix = random.Random(f"prefix {trial.seed}").choice(_PREFIXES)
        self._url = f"s3://{name}/{prefix}"
        self.files = the_server().root / name
        self.reading = Reading(self.files / prefix)
        trial.watch = BucketWatch(self.reading)
        self._proxy = trial.child("proxy", proxying, the_server().port, CLIENTS, between)
        self._ports: dict[str, int] = self._proxy.expect("ports")
        self.owner = trial.attempt(plan).owner

    # -- processes --------------------------------------------------------------------------

    def start_host(self, ranks: Sequence[int], faulty: Faulty | None = None) -> Child:
        """The monitor and some ranks; says ``claimed``."""
        return self._client("host", hosting, self.plan, ranks, faulty)

    def start_ranks(self, ranks: Sequence[int]) -> Child:
        """The other ranks; the monitor has claimed."""
        return self._client("ranks", joined, self.plan, ranks)

    def start(self) -> tuple[Child, Child | None]:
        """The whole job, in one process or two as the plan has it, with its history committed."""
        here, there = self.split()
        host = self.start_host(here)
        host.expect("claimed")
        ranks = self.start_ranks(there) if there else None
        host.expect("history")
        if ranks is not None:
            ranks.expect("history")
        return host, ranks

    def serve(self, name: str, place: Place, api_directory: Path) -> Child:
        """A monitor that is a pod of its own."""
        return self._client(name, serving, self.plan, place, api_directory)

    def start_served(self, places: Sequence[Place], token_file: Path) -> Child:
        """All ranks, with such monitors; says ``claimed``."""
        return self._client("ranks", served, self.plan, places, token_file)

    def split(self) -> tuple[list[int], list[int]]:
        """The ranks of the monitor's process, and those of the other one."""
        everyone = list(range(self.plan.ranks))
        if not self.plan.split:
            return everyone, []
        there = sorted(self.trial.dice.sample(everyone, self.trial.dice.randint(1, len(everyone))))
        return [rank for rank in everyone if rank not in there], there

    def _client(self, name: str, function: Callable[..., None], *arguments: Any) -> Child:
        owner, endpoint = self.trial.owners[-1], f"http://127.0.0.1:{self._ports[name]}"
        where = InBucket(self._url, owner, endpoint, self.trial.uid)
        child = self.trial.child(name, function, where, *arguments)
        self._proxy.tell(f"pid {name} {child.pid}")
        return child

    # -- the proxy --------------------------------------------------------------------------

    def arm(self) -> None:
        """The fault strikes from now on."""
        self._tell("arm")

    def heal(self) -> None:
        """The fault strikes no more."""
        self._tell("heal")

    def release(self) -> None:
        """What is held goes on to the server."""
        self._tell("release")

    def _tell(self, word: str) -> None:
        self._proxy.tell(word)
        self.struck()  # it has obeyed when it answers

    def struck(self) -> int:
        """How often the fault has struck."""
        self._proxy.tell("state")
        return int(self._proxy.expect("state"))

    def wait_struck(self, child: Child) -> bool:
        """Wait until the fault has struck, or the child has something to say: then False."""
        while not self.struck():
            if child.speaks(_TURN):
                return False
        return True

    def quiet(self) -> int:
        """Wait until no request is on its way; how often the fault has struck."""
        self._proxy.tell("quiet")
        return int(self._proxy.expect("quiet"))

    # -- checks -----------------------------------------------------------------------------

    def check(self) -> list[int]:
        """Check all promises of what is committed; returns the committed steps."""
        self.trial.watch.look()
        trial = self.trial
        found = promises.check_commits(self.reading, self.plan, trial.owners, trial.steps)
        self.trial.watch.look()
        return found

    def is_whole(self, manifest: promises.Manifest) -> bool:
        """Whether all its objects are there, and hold what was saved."""
        try:
            promises.check_commit(
                self.reading, self.plan, set(self.trial.owners), self.trial.steps, manifest
            )
        except BrokenError:
            return False
        return True

    def resumable(self) -> int | None:
        """With all processes dead: the step that the next attempt must resume at."""
        found = set(self.check())
        owner = self.trial.owners[-1]
        for step in (*self.plan.history, self.plan.fault, self.plan.after):
            who = self.plan.participants(step, step.shape.kinds[0])
            if self.reading.is_complete(owner, who, step.number):
                found.add(step.number)
        intent = self.reading.intent()
        if intent is not None and all(
            self.reading.bytes_of(key) is not None for key in intent.keys
        ):
            found.add(intent.step)
        return max(found, default=None)

    def check_resumes(self, *, healed: bool = True, surely: bool = True) -> None:
        """With all processes dead: the next attempt resumes at the last complete checkpoint, bit
        for bit, commits the next step, and sweeps what was left.

        Args:
            healed: whether the fault ends before.
            surely: whether it must commit what was complete; else it may resume at the last commit.
        """
        if healed:
            self.heal()
        if not self.quiet():
            self.trial.note(f"the fault did not strike at {self.trial.point}")
        committed, expected = max(self.check(), default=None), self.resumable()
        child = self.start_next()
        resumed = child.expect("resumed")
        if resumed != expected and (surely or resumed != committed):
            raise BrokenError(f"the next attempt resumes at {resumed}, expected {expected}")
        step = self.train(child, (resumed or 0) + STRIDE)
        self.check_swept(step)
        self.end(child)

    def start_next(self) -> Child:
        """A process of the next attempt; see `next_attempt`."""
        self.trial.attempt(self.plan)
        return self._client("next", next_attempt, self.plan)

    def train(self, child: Child, number: int) -> Step:
        """Let an attempt that has resumed commit a step."""
        step = Step(number, Shape.CHECKPOINT)
        self.trial.steps[self.trial.owners[-1].attempt, number] = step
        child.tell(str(number))
        child.expect("trained")
        return step

    def end(self, child: Child) -> None:
        """End an attempt that has trained, and check what it leaves."""
        child.tell("end")
        if child.wait() != 0:
            raise BrokenError(f"{child.name} ended with {child.status}")
        self.check()

    def check_swept(self, newest: Step) -> None:
        """Check that the pointer names the newest commit, and that orphans go in time."""
        if self.check()[-1:] != [newest.number] or self.reading.pointer() != newest.number:
            raise BrokenError(
                f"the pointer names {self.reading.pointer()}, committed last is {newest.number}"
            )
        end = time.monotonic() + ORPHANS_SECONDS
        while left := promises.orphans(self.reading, self.trial.owners[-1]):
            if time.monotonic() > end:
                raise BrokenError(f"orphans are left after {ORPHANS_SECONDS:g} s: {left[:20]}")
            self.trial.watch.look()
            time.sleep(_TURN)
