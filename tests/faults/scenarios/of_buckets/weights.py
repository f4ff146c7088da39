"""Versions of weights in a bucket: trainers that die or are deposed, and explorers that read."""

import json
import random
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import xxhash
from trainsync.weights.delta.compiling import prepare

from tests.faults.in_bucket.promises import BucketWatch, Reading
from tests.faults.in_bucket.proxying import Between, Breach, proxying
from tests.faults.in_bucket.server import the_server
from tests.faults.in_bucket.weights import DEPOSED, UID, Where, exploring, publishing
from tests.faults.processes import BrokenError, Child
from tests.faults.scenario import Scenario
from tests.faults.trial import Trial
from tests.store.servers.fault_proxy import Fault

_CLIENTS: Final = ("trainer", "next", "last", "explorer")
_PREFIXES: Final = ("runs/a", "a b/c+d", "größe/50%25", "x")
_REQUESTS: Final = {
    "index": ("PUT", r"weights/INDEX\.json"),
    "object": ("PUT", r"\.(anchor|delta)(\?|$)"),
    "read": ("GET", r"\.(anchor|delta)(\?|$)"),
    "look": ("GET", r"weights/INDEX\.json"),
}
_KILLS: Final = {"before": Fault.CUT, "amid": Fault.HALF_SENT, "served": Fault.LOST_REPLY}
_BREAKS: Final = {
    "lost": Fault.LOST_REPLY,
    "failed": Fault.DONE_BUT_500,
    "refused": Fault.REFUSED,
    "truncated": Fault.TRUNCATED,
    "corrupted": Fault.CORRUPTED,
    "etag": Fault.OTHER_ETAG,
}
_COMPILE_SECONDS: Final = 120.0


def _index(root: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((root / "weights/INDEX.json").read_bytes())
    return found


def _objects(row: dict[str, Any]) -> list[dict[str, Any]]:
    return [row[kind] for kind in ("delta", "anchor", "proof") if row.get(kind)]


def _check_whole(root: Path) -> None:
    """Every object that the index names is there, with its bytes."""
    for row in _index(root)["versions"]:
        for one in _objects(row):
            path = root / one["key"]
            if not path.exists():
                raise BrokenError(f"version {row['weightVersion']} is published without {path}")
            data = path.read_bytes()
            digest = f"xxh3-128:{xxhash.xxh3_128_hexdigest(data)}"
            if (len(data), digest) != (one["bytes"], one["digest"]):
                raise BrokenError(f"{one['key']} of a published version has other bytes")


def _check_swept(root: Path, newest: int) -> None:
    """Of former attempts nothing is there but what the index names."""
    index = _index(root)
    named = {one["key"] for row in index["versions"] for one in _objects(row)}
    named |= {one["key"] for one in index["retired"]}
    left = []
    for path in (root / "weights" / UID).rglob("*"):
        attempt = int(path.relative_to(root / "weights" / UID).parts[0].partition("-")[0])
        if path.is_file() and attempt < newest and path.relative_to(root).as_posix() not in named:
            left.append(path.name)
    if left:
        raise BrokenError(f"objects of trainers that are over are left: {left}")


class _Scene:
    """A bucket with a proxy before it, and the processes."""

    def __init__(self, trial: Trial, between: Between, name: str) -> None:
        self.trial = trial
        prefix = random.Random(f"prefix {trial.seed}").choice(_PREFIXES)
        self._url = f"s3://{name}/{prefix}"
        self.root = the_server().root / name / prefix
        trial.watch = BucketWatch(Reading(self.root))
        self._proxy = trial.child("proxy", proxying, the_server().port, _CLIENTS, between)
        self._ports: dict[str, int] = self._proxy.expect("ports")

    def where(self, client: str) -> Where:
        return Where(self._url, f"http://127.0.0.1:{self._ports[client]}")

    def trainer(self, client: str, attempt: int) -> tuple[Child, list[tuple[int, int]]]:
        """A trainer that holds the index, and the versions that it found."""
        child = self.trial.child(client, publishing, self.where(client), attempt)
        self._proxy.tell(f"pid {client} {child.pid}")
        return child, child.expect("claimed")

    def tell(self, word: str) -> None:
        """``arm``, ``heal`` or ``release``; it has obeyed when this returns."""
        self._proxy.tell(word)
        self.struck()

    def struck(self) -> int:
        self._proxy.tell("state")
        return int(self._proxy.expect("state"))

    def quiet(self) -> int:
        """Wait until no request is on its way; how often the fault has struck."""
        self._proxy.tell("quiet")
        return int(self._proxy.expect("quiet"))


@contextmanager
def _scene(trial: Trial, between: Between) -> Iterator[_Scene]:
    name = f"bucket-{secrets.token_hex(8)}"
    files = the_server().bucket(name)
    try:
        yield _Scene(trial, between, name)
    finally:
        trial.end()
        shutil.rmtree(files, ignore_errors=True)


def _publish(child: Child, first: int, last: int) -> None:
    """Let it publish versions, all of which must be."""
    child.tell(f"publish {first} {last}")
    outcomes = child.expect("published")
    if list(outcomes.values()) != [""] * (last - first + 1):
        raise BrokenError(f"{child.name} could not publish: {outcomes}")


def _between(trial: Trial) -> Between:
    how, _, what = trial.point.partition("/")
    dice = trial.dice
    if how == "throttled":
        return Between(rate=1_000_000.0)
    if how == "side_by_side":
        return Between()
    method, pattern = _REQUESTS[what]
    after = {"after": dice.randrange(3)}
    if how in _KILLS:
        return Between([Breach("trainer", _KILLS[how], method, pattern, kills=True, more=after)])
    if how == "late":
        dies = dice.random() < 0.5
        return Between([Breach("trainer", Fault.HELD, method, pattern, kills=dies, more=after)])
    client, more = "trainer", {**after, "left": dice.randint(1, 2)}
    if method == "GET":  # an explorer may read but once, by which it has the newest version
        client, more = "explorer", {"left": dice.randint(1, 2)}
    return Between([Breach(client, _BREAKS[how], method, pattern, more=more)])


def _weights(trial: Trial) -> None:
    """A trainer publishes, an explorer reads, the fault strikes; the next trainer goes back some
    versions and publishes, and the one after it sweeps."""
    how = trial.point.partition("/")[0]
    if not prepare(_COMPILE_SECONDS, compact=True):
        raise BrokenError("the loops of deltas are not compiled in time")
    dice = trial.dice
    history, count = dice.randint(1, 5), dice.randint(4, 7)
    if how == "side_by_side":
        count = 40  # so that the claim comes amid them
    between = _between(trial)
    with _scene(trial, between) as made:
        trainer, _ = made.trainer("trainer", 1)
        _publish(trainer, 1, history)
        explorer = trial.child("explorer", exploring, made.where("explorer"))
        made.tell("arm")
        last = history + count
        if how in (*_KILLS, "late", "side_by_side"):
            trainer.tell(f"publish {history + 1} {last}")
            if how in _KILLS:
                said, value = trainer.listen()
                if said != "ended":
                    raise BrokenError(f"the trainer was not killed: it says {said!r}: {value}")
            elif how == "late":
                while not made.struck() and not trainer.speaks(0.01):
                    pass
        else:
            _publish(trainer, history + 1, last)
            while trial.point.endswith(("/read", "/look")) and not made.struck():
                if explorer.speaks(0.01):
                    raise BrokenError(f"the explorer says {explorer.listen()}")
            made.tell("heal")
            if dice.random() < 0.5:
                trainer.kill()
        successor, found = made.trainer("next", 2)
        begin = dice.randint(1, max((version for _, version in found), default=1))
        early = dice.random() < 0.5
        if early:
            made.tell("release")
        _publish(successor, begin, begin + 2)
        made.tell("heal")
        made.tell("release")
        if trainer.status is None and how in ("late", "side_by_side"):
            said, outcomes = trainer.listen()
            if said == "published" and DEPOSED in outcomes.values():
                trial.note("the older trainer was told that it is deposed")
            elif said == "published" and any(outcomes.values()):
                raise BrokenError(f"the older trainer could not publish: {outcomes}")
        _publish(successor, begin + 3, begin + 4)
        explorer.tell(f"2 {begin + 4}")
        took = explorer.expect("took", 120)
        if took[-1:] != [(2, begin + 4)]:
            raise BrokenError(f"the explorer has not come to version {begin + 4}: {took}")
        if took != sorted(set(took)):
            raise BrokenError(f"the explorer went back: {took}")
        if not made.quiet() and between.breaches:
            trial.note(f"the fault did not strike at {trial.point}")
        _check_whole(made.root)
        strangers = [
            row["weightVersion"]
            for row in _index(made.root)["versions"]
            if row["attempt"] == 1 and (1, row["weightVersion"]) not in found
        ]
        if strangers:
            raise BrokenError(f"of the older trainer came after the newer's claim: {strangers}")
        trainer.kill()
        successor.kill()
        made.trainer("last", 3)
        _check_whole(made.root)
        _check_swept(made.root, 3)


SCENARIOS = (
    Scenario(
        name="bucket_weights",
        broken="a trainer that publishes weights dies, is deposed or unheard at a request; an "
        "explorer's answers are cut, changed or refused",
        holds="no explorer has a wrong version or goes back, no deposed trainer publishes; the "
        "next one's versions come, and what is left goes with a claim",
        points=(
            "before/index", "amid/index", "served/index",
            "before/object", "amid/object", "served/object",
            "late/index", "late/object", "side_by_side",
            "lost/index", "failed/index", "etag/index", "refused/index",
            "lost/object", "failed/object", "refused/object",
            "truncated/read", "corrupted/read", "refused/read",
            "truncated/look", "refused/look", "throttled",
        ),
        trial=_weights,
    ),
)  # fmt: skip
