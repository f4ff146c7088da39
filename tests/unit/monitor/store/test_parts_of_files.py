"""Saves that keep a part of a file, where what is written or found is odd."""

from dataclasses import replace
from functools import partial
from typing import Any, BinaryIO

import pytest
import torch
from trainsync.checkpoint.save.files.dumping import dump
from trainsync.checkpoint.save.places import store as places
from trainsync.checkpoint.save.places import unchanged
from trainsync.checkpoint.save.places.store import StorePlace
from trainsync.storage import block_digests
from trainsync.storage.block_digests import BLOCK
from trainsync.storage.errors import DamagedFileError
from trainsync.storage.objects import commits, keys
from trainsync.storage.objects.live import references
from trainsync.storage.objects.manifests import Stored
from trainsync.storage.saves.based import Base, Blocks
from trainsync.storage.saves.receipts import FileEntry, Receipt

from tests.unit.monitor.store import incremental_runs
from tests.unit.monitor.store.incremental_runs import (
    CHECKPOINT,
    PARTS,
    SIZE,
    Run,
    owner_of,
    path_of,
    saved,
    state,
)

EVERYONE = set(PARTS)


@pytest.fixture(autouse=True)
def all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """States of any size are kept."""
    for module in (places, unchanged):
        monkeypatch.setattr(module, "LEAST", 1)


def stored(run: Run) -> Stored:
    return commits.read_manifest(run.bucket, CHECKPOINT, run.step)


def test_what_pickles_itself_in_another_way_each_time_is_written_in_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = 0

    def dump_another(state: Any, file: BinaryIO) -> None:
        nonlocal times
        times += 1
        dump(state | {"times": torch.full((8,), times)}, file)

    monkeypatch.setattr(incremental_runs, "dump", dump_another)
    run = Run(keep=3, frozen=2)
    for _ in range(3):
        saved(run, EVERYONE)
        assert stored(run).bases == {}
    run.check()
    put = {info.key for info in run.bucket.below(keys.step_objects(run.step))}
    assert put == stored(run).objects, "nothing is left of what was of no use"


def test_a_file_whose_digests_are_of_other_blocks_is_written_in_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run(keep=3, frozen=4)
    with monkeypatch.context() as patch:  # another release's
        patch.setattr(block_digests.BlockHasher.__init__, "__defaults__", (BLOCK // 2,))
        saved(run, EVERYONE)
    run.restart()
    saved(run, EVERYONE)
    assert stored(run).bases == {}
    saved(run, EVERYONE)
    assert {keys.step_of(base.key) for base in stored(run).bases.values()} == {run.step - 1}
    run.check()


def test_a_forged_receipt_with_two_sizes_of_a_file_is_refused() -> None:
    entry = FileEntry("actor/m.pt", 3 * BLOCK, "xxh3-128:" + "0" * 32)
    older = "objects/global_step_4/run-0-aaaaaaaa0-bbbbbbbb/actor/m.pt"
    receipt = Receipt(
        kind=CHECKPOINT,
        step=5,
        attempt=0,
        incarnation="aaaaaaaa0",
        component="model",
        rank=0,
        world_size=1,
        files=(entry,),
        seconds=0.0,
        based={entry.path: Base.of(older, Blocks.of(entry.bytes, BLOCK, [1]))},
        version=2,
    )
    references.check_older("receipt", receipt)
    assert receipt.kept_bytes == 2 * BLOCK
    twice = (replace(entry, bytes=7 * BLOCK), replace(entry, bytes=9 * BLOCK), entry)
    with pytest.raises(DamagedFileError, match="names other blocks"):
        references.check_older("receipt", replace(receipt, files=twice))
    with pytest.raises(DamagedFileError, match="which it does not list"):
        references.check_older("receipt", replace(receipt, files=()))


def test_a_process_that_starts_again_saves_the_step_with_other_parts() -> None:
    run = Run(keep=1, frozen=2)
    saved(run, EVERYONE)
    run.restart()
    saved(run, EVERYONE)
    run.register(EVERYONE)
    (step, part, value), owner = run.todo[0], owner_of(run.attempt)
    dying = run.place.part(CHECKPOINT, step, part)
    dying.write_state(path_of(part), partial(dump, state(value, run.frozen)), SIZE * 4)
    assert dying.based != {}
    run.place = StorePlace(run.bucket, owner.attempt, owner.incarnation, incremental=True)
    while run.todo:
        run.write(0)
    run.tick()
    run.check()
    (committed,) = commits.committed_steps(run.bucket, CHECKPOINT)
    assert committed == step
    assert dying.writer not in stored(run).keys[path_of(part)]
    run.go_on()
    run.sweep()
    run.check()
    assert {info.key for info in run.bucket.below(keys.OBJECTS)} == stored(run).objects
