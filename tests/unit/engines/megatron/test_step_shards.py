"""Shards are opened where they lie in memory, and no byte there is believed. Without Megatron.

Of a bucket: `test_stored_step`.
"""

import dataclasses
import io
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trainsync.checkpoint.errors import CorruptCheckpointError, StateMismatchError
from trainsync.checkpoint.load.account import LoadedBytes
from trainsync.checkpoint.load.reshard.shard_files import Component
from trainsync.checkpoint.load.resume import Resume
from trainsync.checkpoint.load.step_files import StepFiles
from trainsync.checkpoint.megatron_shards import Box, MegatronShards, pack, require
from trainsync.engines.megatron.step_shards import StepShards
from trainsync.storage.saves.receipts import Participant

from tests.unit.checkpoint.memory.keeping import Keeping, manifest_of

COMPONENT = Component("model", "actor", 2, frozenset({0, 1}))
PATHS = [COMPONENT.path(rank) for rank in (0, 1)]
ROWS = torch.arange(8.0).reshape(4, 2)


def shard(rank: int) -> bytes:
    """A rank's file: two rows of the weight."""
    file = io.BytesIO()
    box = Box("weight", (4, 2), (2 * rank, 0), 0, False, ROWS[2 * rank : 2 * rank + 2].clone())
    torch.save(pack([box], {"tp": 2}), file)
    return file.getvalue()


@pytest.fixture
def keeping(tmp_path: Path) -> Keeping:
    return Keeping(tmp_path)


@pytest.fixture
def resume(keeping: Keeping) -> Resume:
    ranks = (0, 1)
    files = {PATHS[rank]: shard(rank) for rank in ranks}
    manifest = manifest_of(files, *(Participant("model", rank) for rank in ranks))
    return Resume(5, keeping.run.step(5), manifest, memory=keeping.place)


def put(resume: Resume, rank: int, data: bytes | None = None) -> None:
    path = resume.path / PATHS[rank]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(shard(rank) if data is None else data)


def keep(keeping: Keeping, rank: int) -> Path:
    """The rank's file in memory."""
    before = set(keeping.names())
    keeping.keep(5, shard(rank), Participant("model", rank))
    (name,) = set(keeping.names()) - before
    return keeping.place.path(name)


def replace(path: Path, before: bytes, after: bytes) -> None:
    data = path.read_bytes()
    assert before in data
    path.write_bytes(data.replace(before, after))


def opened(
    resume: Resume, sources: StepFiles, begin: int, rows: int, world_size: int = 2
) -> tuple[torch.Tensor, set[str]]:
    """Rank 0 reads rows of the weight; those, and the files that it reads."""

    def needed(shards: MegatronShards) -> set[str]:
        require(shards, "weight", (4, 2), "tp=2")
        return shards.paths_of("weight", (begin, 0), (rows, 2))

    ranks: Any = SimpleNamespace(rank=0, world_size=world_size)
    shards, paths = StepShards(resume, sources, ranks).open(COMPONENT, needed)
    shards.fetch([("weight", (begin, 0), (rows, 2))], sources.copy)
    return shards.read("weight", (begin, 0), (rows, 2)).clone(), paths


def test_where_a_ranks_own_file_is_enough_no_other_one_is_opened(
    keeping: Keeping, resume: Resume
) -> None:
    keep(keeping, 0)
    with StepFiles(resume) as sources:
        found, paths = opened(resume, sources, 0, 2)
        assert paths == {PATHS[0]}
        assert sources.bytes(paths) == LoadedBytes(len(shard(0)), 0)
    assert torch.equal(found, ROWS[:2])


def test_what_others_have_is_read_from_memory_and_from_the_volume(
    keeping: Keeping, resume: Resume
) -> None:
    keep(keeping, 0)
    put(resume, 1)
    with StepFiles(resume) as sources:
        found, paths = opened(resume, sources, 1, 2)
        assert paths == set(PATHS)
        assert sources.bytes(paths) == LoadedBytes(len(shard(0)), len(shard(1)))
    assert torch.equal(found, ROWS[1:3])


def test_another_number_of_ranks_reads_only_the_files_with_its_part(
    keeping: Keeping, resume: Resume
) -> None:
    for rank in (0, 1):
        keep(keeping, rank)
    with StepFiles(resume) as sources:
        found, paths = opened(resume, sources, 2, 2, world_size=3)
        assert paths == {PATHS[1]}
    assert torch.equal(found, ROWS[2:])


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("before", "after"), [(b"weight", b"wejght"), (b"boxes", b"bowes"), (b"PK", b"KP")]
)
def test_a_file_in_memory_that_says_something_else_is_as_if_it_were_not_there(
    keeping: Keeping, resume: Resume, rank: int, before: bytes, after: bytes
) -> None:
    replace(keep(keeping, rank), before, after)
    put(resume, 0)
    put(resume, 1)
    with StepFiles(resume) as sources:
        found, paths = opened(resume, sources, 0, 4)
        assert paths == set(PATHS)
        assert sources.bytes(paths) == LoadedBytes(0, len(shard(0)) + len(shard(1)))
    assert torch.equal(found, ROWS)


def test_a_wrong_number_in_memory_is_read_from_the_volume(keeping: Keeping, resume: Resume) -> None:
    replace(keep(keeping, 0), ROWS[:1].numpy().tobytes(), b"\xff" * 8)
    put(resume, 0)
    with StepFiles(resume) as sources:
        found, paths = opened(resume, sources, 0, 2)
        assert sources.bytes(paths) == LoadedBytes(0, len(shard(0)))
    assert torch.equal(found, ROWS[:2])


def test_what_is_nowhere_right_is_told_of(keeping: Keeping, resume: Resume) -> None:
    replace(keep(keeping, 0), b"weight", b"wejght")
    put(resume, 0, b"\xff" * len(shard(0)))
    put(resume, 1)
    told: list[str] = []

    def report(what: str) -> bool:
        told.append(what)
        return True

    resume = dataclasses.replace(resume, report=report)
    with (
        StepFiles(resume) as sources,
        pytest.raises(CorruptCheckpointError, match=r"rank_0\.pt has .* was told"),
    ):
        opened(resume, sources, 0, 4)
    assert len(told) == 1


def test_another_model_is_refused_as_on_the_volume(keeping: Keeping, resume: Resume) -> None:
    for rank in (0, 1):
        keep(keeping, rank)

    def needed(shards: MegatronShards) -> set[str]:
        require(shards, "weight", (4, 3), "tp=2")
        return set()

    ranks: Any = SimpleNamespace(rank=0, world_size=2)
    with StepFiles(resume) as sources, pytest.raises(StateMismatchError, match="the same model"):
        StepShards(resume, sources, ranks).open(COMPONENT, needed)


def test_a_good_file_beside_a_bad_one_of_the_same_name_is_read(
    keeping: Keeping, resume: Resume
) -> None:
    """It is not taken for the bad one that was mapped before, whatever its descriptor's number."""
    bad = keep(keeping, 0)
    place = dataclasses.replace(keeping.place, shared=keeping.directory)
    assert place.guests is not None
    place.guests.make()
    shutil.copyfile(bad, place.guests.directory / bad.name)
    replace(bad, ROWS[:1].numpy().tobytes(), b"\xff" * 8)
    with StepFiles(dataclasses.replace(resume, memory=place)) as sources:
        found, paths = opened(resume, sources, 0, 2)
        assert sources.bytes(paths) == LoadedBytes(len(shard(0)), 0)
    assert torch.equal(found, ROWS[:2])


@pytest.mark.parametrize("begin", [0, 2])
def test_of_what_was_fetched_only_what_is_read_counts(
    keeping: Keeping, resume: Resume, begin: int
) -> None:
    """In another layout, the file that a rank fetches may have none of its part."""
    keep(keeping, 1)
    with StepFiles(resume) as sources:
        sources.find([PATHS[0]])
        keep(keeping, 0)  # now a neighbour has sent it
        sources.memory.find_again([PATHS[0]], [PATHS[0]])
        ranks: Any = SimpleNamespace(rank=0, world_size=2, do=lambda _, work: [work()])
        step = StepShards(resume, sources, ranks)

        def needed(shards: MegatronShards) -> set[str]:
            return shards.paths_of("weight", (begin, 0), (2, 2))

        step.check(lambda: step.open(COMPONENT, needed)[1], "planning")
        read = step.bytes
    size = len(shard(0))
    assert read == LoadedBytes(memory=size, neighbour=size if begin == 0 else 0)
