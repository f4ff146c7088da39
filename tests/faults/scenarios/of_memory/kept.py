"""What is kept in memory is damaged, has no room, is gone, or is of another number of ranks."""

import signal
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from tests.faults.inject import small_volume
from tests.faults.memory import promises
from tests.faults.memory.promises import Tier
from tests.faults.memory.scene import Scene, Tiers, scene
from tests.faults.processes import BrokenError
from tests.faults.scenario import Scenario
from tests.faults.scenarios.of_memory.common import APART, PODS, from_memory
from tests.faults.trial import Trial

_COLUMNS = 1000
"""Of a model whose shards, of some 30 KB, are much larger than the rest."""
_MANY_COLUMNS = 100_000
"""Of a model whose shards, of some 3 MB, are larger than `_SPARE`."""
_SPARE = 1 << 20
"""Room that a file takes beyond its state until it is whole."""
_PAGE = 4096


def _damaged(trial: Trial) -> None:
    copies = trial.dice.randint(0, 1) if trial.point == "own" else 1
    pods = trial.dice.choice((*APART, (0, 0, 1)))
    victim = trial.dice.randrange(len(pods))
    with scene(trial, copies=copies, pods=pods) as made:
        made.first().kill()
        known: Tiers = from_memory(pods)
        if trial.point != "copy":
            tier = Tier.NEIGHBOUR if copies and trial.point == "own" else Tier.VOLUME
            known = {**known, victim: (tier,)}
            _damage(trial, made, victim, own=True)
        else:
            known = {**made.lose(pods[victim]), victim: (Tier.VOLUME,)}
        if trial.point != "own":
            _damage(trial, made, victim, own=False)
        made.goes_on(known)


def _damage(trial: Trial, made: Scene, rank: int, *, own: bool) -> None:
    """Damage all that is kept of a rank, in its pod or in all others."""
    spoil = trial.dice.choice(_DAMAGES)
    assert made.committed is not None
    wanted = {
        entry.digest
        for entry in promises.files_of(made.saved(made.committed), rank, made.world_size)
    }
    struck = 0
    for pod in set(made.pods):
        for place in promises.places_of(made.place_of(pod)):
            for kept in list(place.files()):
                if kept.digest in wanted and (pod == made.pods[rank]) == own:
                    spoil(trial, place.path(kept))
                    struck += 1
    if struck != len(wanted):
        raise BrokenError(f"{struck} files of rank {rank} are kept, expected {len(wanted)}")


def _flip(trial: Trial, path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[trial.dice.randrange(len(data))] ^= 1 << trial.dice.randrange(8)
    path.write_bytes(data)


def _cut(trial: Trial, path: Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: trial.dice.randrange(len(data))])


def _lengthen(trial: Trial, path: Path) -> None:
    path.write_bytes(path.read_bytes() + bytes(trial.dice.randint(1, 100)))


def _exchange(trial: Trial, path: Path) -> None:
    """As many bytes of another file, or zeros: such as those of a page that was never written."""
    before = path.read_bytes()
    others = [other for other in sorted(path.parent.iterdir()) if other.is_file() and other != path]
    data = (trial.dice.choice(others).read_bytes() + bytes(len(before)))[: len(before)]
    if data == before:  # the other one has got this one's bytes in the same manner
        data = bytes(len(before))
    path.write_bytes(data)


_DAMAGES: tuple[Callable[[Trial, Path], None], ...] = (_flip, _flip, _cut, _lengthen, _exchange)


def _over_budget(trial: Trial) -> None:
    """Own files have a half of the budget where there are copies."""
    copies = trial.dice.randint(0, 1)
    shard = 4 * 7 * _MANY_COLUMNS
    least, most = {"nothing_fits": (0, 0), "a_part_fits": (1, 2.5), "one_save_fits": (3, 5)}[
        trial.point
    ]
    each = round(shard * trial.dice.uniform(least, most)) + (_SPARE if most else 1)
    pods = trial.dice.choice(PODS)
    budget = each * (1 + copies)
    with scene(trial, copies=copies, pods=pods, budget=budget, columns=_MANY_COLUMNS) as made:
        made.first().kill()
        none = dict.fromkeys(range(len(pods)), (Tier.VOLUME,))
        made.goes_on(none if trial.point == "nothing_fits" else None)


def _full(trial: Trial) -> None:
    copies = trial.dice.randint(0, 1)
    pods = trial.dice.choice(PODS)
    size, inodes = 1 << 30, 1 << 16
    if trial.point == "of_bytes":
        size = _PAGE * trial.dice.randint(1, 40)
    else:
        inodes = trial.dice.randint(1, 14)
    with scene(trial, copies=copies, pods=pods, columns=_COLUMNS) as made, ExitStack() as stack:
        for pod in set(pods):
            stack.enter_context(small_volume(made.memory_of(pod), size, inodes))
        made.first().kill()
        made.goes_on()


def _gone(trial: Trial) -> None:
    """The preStop command and the save that it asks for: see `run_preempted`."""
    pods = trial.dice.choice(PODS)
    with scene(trial, copies=trial.dice.randint(0, 1), pods=pods) as made:
        attempt = made.first()
        if trial.point == "suspended":
            for child in (*attempt.ranks, attempt.monitor):
                child.tell("end")
                child.wait()
        else:
            for child in attempt.ranks:
                child.tell(f"save {made.next()}")
            for child in attempt.ranks:
                child.signal(signal.SIGTERM)
        attempt.kill()
        known = made.lose(*set(pods))
        made.goes_on(known, later=known)


def _other_size(trial: Trial) -> None:
    """Ranks may read what lies in their own pods; nothing is fetched for them."""
    before, after = trial.dice.choice((((0, 1), (0,)), ((0, 1, 2), (0, 1)), ((0, 0, 1), (0, 1))))
    if trial.point == "more":
        before, after = after, before
    with scene(trial, copies=trial.dice.randint(0, 1), pods=before, sharded=True) as made:
        made.first().kill()
        if trial.dice.random() < 0.5:
            made.lose(trial.dice.choice(before))
        made.move(after)
        near = (Tier.MEMORY, Tier.VOLUME)
        made.goes_on(dict.fromkeys(range(len(after)), near))


SCENARIOS = (
    Scenario(
        name="kept_memory_damaged",
        broken="bits, lengths and contents of files that are kept in memory change",
        holds="the digest refuses them: the neighbour's copy serves, else the volume",
        points=("own", "copy", "own_and_copy"),
        trial=_damaged,
    ),
    Scenario(
        name="memory_over_budget",
        broken="the budget is too small for all, or a part, of what is kept",
        holds="every save commits; what was kept whole serves, the volume the rest",
        points=("nothing_fits", "a_part_fits", "one_save_fits"),
        trial=_over_budget,
    ),
    Scenario(
        name="kept_memory_full",
        broken="the memory file system of the pods is full, of bytes or of files",
        holds="every save commits; what was kept whole serves, the volume the rest",
        points=("of_bytes", "of_files"),
        trial=_full,
        needs_root="it mounts small file systems",
    ),
    Scenario(
        name="memory_gone",
        broken="a suspension or a preemption takes all pods",
        holds="the last commit is loaded from the volume",
        points=("suspended", "preempted"),
        trial=_gone,
    ),
    Scenario(
        name="world_size_changed",
        broken="another number of ranks loads than saved, with or without their memory",
        holds="nothing is fetched from neighbours, and the state is the one that was saved",
        points=("fewer", "more"),
        trial=_other_size,
    ),
)
