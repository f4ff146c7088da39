"""Ranks that load fetch from one another what they lack, and say what they could not get."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trainsync.checkpoint.load.resume import Resume
from trainsync.checkpoint.memory.kept import KeptShards
from trainsync.checkpoint.memory.lookup import Sources
from trainsync.checkpoint.memory.neighbour.fetching import Holder, bring, choose
from trainsync.checkpoint.memory.place import MemoryPlace
from trainsync.checkpoint.memory.shared import SharedVolume
from trainsync.dist.agreement import Agreement
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves.receipts import Participant

from tests.unit.checkpoint.memory.keeping import INCARNATION, digest_of, manifest_of

PATHS = ["actor/model_world_size_2_rank_0.pt", "actor/model_world_size_2_rank_1.pt"]
DATA = [b"first" * 300_000, b"other" * 400_000]
PARTICIPANTS = (Participant("model", 0), Participant("model", 1))
ResultT = TypeVar("ResultT")


class Store:
    """The store of a process group of threads."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def set(self, key: str, value: str, /) -> None:
        with self._lock:
            self._values[key] = value.encode()

    def get(self, key: str, /) -> bytes:
        return self._values[key]

    def check(self, keys: list[str], /) -> bool:
        return all(key in self._values for key in keys)

    def add(self, key: str, amount: int, /) -> int:
        with self._lock:
            value = int(self._values.get(key, b"0")) + amount
            self._values[key] = str(value).encode()
            return value

    def delete_key(self, key: str, /) -> bool:
        with self._lock:
            return self._values.pop(key, None) is not None


class Rank:
    """A rank in a pod of its own, which needs the file of its number."""

    def __init__(self, directory: Path, rank: int, budget: int = 64 << 20) -> None:
        memory = directory / f"shm-{rank}"
        memory.mkdir()
        self.run = RunDirectory(directory / "run")
        self.place = MemoryPlace.of_run(memory, budget, "uid", self.run.root, copies=1)
        self.rank = rank

    def keep(self, number: int, data: bytes | None = None, *, as_guest: bool = False) -> None:
        """Have a file in memory; with ``data``, other bytes under its name."""
        shared = SharedVolume(self.run)
        shards = KeptShards(self.place, shared, 0, INCARNATION)
        if as_guest:
            shards.hold()
            assert self.place.guests is not None
            shards = KeptShards(self.place.guests, shared, 0, INCARNATION)
        file = shards.begin(5, Participant("model", number), len(DATA[number]))
        assert file is not None
        file.write(memoryview(DATA[number] if data is None else data))
        file.seal(digest_of(DATA[number]))

    def bring(
        self, store: Store, own: Sequence[str], seconds: float = 60.0, world_size: int = 2
    ) -> tuple[int, list[bytes | None]]:
        """Bytes that were brought, and what this rank then reads from memory."""
        manifest = manifest_of(dict(zip(PATHS, DATA, strict=True)), *PARTICIPANTS)
        resume = Resume(5, self.run.step(5), manifest, memory=self.place)
        ranks = Agreement(store, self.rank, world_size, 60)
        with Sources(resume) as sources:
            bring(resume, lambda: own, sources, ranks, seconds)
            found = [
                sources.path(path).read_bytes() if sources.in_memory(path) else None for path in own
            ]
            return sources.bytes(own).neighbour, found


def together(calls: list[Callable[[], ResultT]]) -> list[ResultT]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [done.result(90) for done in [pool.submit(call) for call in calls]]


def load(
    ranks: list[Rank],
    own: Sequence[Sequence[str]] = ((PATHS[0],), (PATHS[1],)),
    seconds: float = 60.0,
) -> list[tuple[int, list[bytes | None]]]:
    store = Store()
    return together(
        [
            partial(rank.bring, store, paths, seconds, len(ranks))
            for rank, paths in zip(ranks, own, strict=True)
        ]
    )


@pytest.fixture
def ranks(tmp_path: Path) -> list[Rank]:
    (tmp_path / "run").mkdir()
    return [Rank(tmp_path, number) for number in range(2)]


def test_a_rank_in_a_new_pod_gets_its_file_from_the_neighbour(ranks: list[Rank]) -> None:
    ranks[0].keep(0)
    ranks[0].keep(1, as_guest=True)
    assert load(ranks) == [(0, [DATA[0]]), (len(DATA[1]), [DATA[1]])]
    # It lies in the new pod from then on.
    assert load(ranks) == [(0, [DATA[0]]), (0, [DATA[1]])]


def test_ranks_that_changed_pods_get_what_each_left_in_the_other(ranks: list[Rank]) -> None:
    ranks[0].keep(1)
    ranks[1].keep(0)
    assert load(ranks) == [(len(DATA[0]), [DATA[0]]), (len(DATA[1]), [DATA[1]])]


def test_what_has_not_come_in_time_is_left_to_the_volume(ranks: list[Rank]) -> None:
    ranks[0].keep(0)
    ranks[0].keep(1, as_guest=True)
    assert load(ranks, seconds=-1.0) == [(0, [DATA[0]]), (0, [None])]


def test_a_file_that_differs_is_not_taken(ranks: list[Rank]) -> None:
    ranks[0].keep(0)
    ranks[0].keep(1, b"\0" * len(DATA[1]), as_guest=True)
    assert load(ranks) == [(0, [DATA[0]]), (0, [None])]


def test_a_file_that_is_too_short_is_not_taken(ranks: list[Rank]) -> None:
    ranks[0].keep(1, DATA[1][:-1], as_guest=True)
    assert load(ranks) == [(0, [None]), (0, [None])]


def test_without_room_nothing_is_taken(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    ranks = [Rank(tmp_path, 0), Rank(tmp_path, 1, budget=1 << 20)]
    ranks[0].keep(1, as_guest=True)
    assert load(ranks) == [(0, [None]), (0, [None])]


def test_a_rank_that_needs_nothing_fetches_nothing(ranks: list[Rank]) -> None:
    ranks[0].keep(1)
    assert load(ranks, [(), ()]) == [(0, []), (0, [])]


def test_a_volume_without_a_key_costs_no_load(ranks: list[Rank]) -> None:
    ranks[0].keep(1)
    ranks[0].run.memory_key.parent.mkdir()
    ranks[0].run.memory_key.write_bytes(b"torn")
    assert load(ranks) == [(0, [None]), (0, [None])]


def test_a_pod_whose_files_are_damaged_gets_its_neighbours_copy(tmp_path: Path) -> None:
    """Four of the file's five holders are ranks of the pod itself, and at most two are asked."""
    (tmp_path / "run").mkdir()
    first, other = Rank(tmp_path, 0), Rank(tmp_path, 1)
    pod = [first]
    for number in range(2, 5):
        mate = Rank(tmp_path, number)
        mate.place = first.place
        pod.append(mate)
    first.keep(0, b"\0" * len(DATA[0]))
    other.keep(0, as_guest=True)
    ranks = [*pod, other]
    for number, rank in enumerate(ranks):
        rank.rank = number
    loaded = load(ranks, [(PATHS[0],), (), (), (), ()])
    assert loaded[0] == (len(DATA[0]), [DATA[0]])


HOLDERS = st.lists(
    st.tuples(st.frozensets(st.integers(0, 3)), st.sampled_from(["a", "b", "c"])),
    min_size=1,
    max_size=5,
)


@given(HOLDERS, st.integers(0, 3), st.integers(0, 4))
def test_those_of_other_pods_that_have_a_file_are_asked_for_it_each_once(
    files: list[tuple[frozenset[int], str]], file: int, rank: int
) -> None:
    rank %= len(files)
    holders = [
        Holder(("host", number), having, lacks=True, pod=pod)
        for number, (having, pod) in enumerate(files)
    ]
    asked = choose(holders, file, rank)
    own = holders[rank].pod
    assert sorted(asked) == [
        holder.address for holder in holders if file in holder.files and holder.pod != own
    ]
    assert [Holder.parse(holder.to_json()) for holder in holders] == holders
