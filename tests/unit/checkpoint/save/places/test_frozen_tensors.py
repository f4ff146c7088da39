"""Saves into a store that write of one component only what has changed in it."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from trainsync import RunContext, all_ranks
from trainsync.api import env
from trainsync.api.protocol import SaveKind
from trainsync.checkpoint.errors import SaveAbortedError
from trainsync.checkpoint.load import stored
from trainsync.checkpoint.load.loading import load_shard
from trainsync.checkpoint.load.resume import Resume
from trainsync.checkpoint.memory import shared
from trainsync.storage.block_digests import beside
from trainsync.storage.copying.store import StoreSource
from trainsync.storage.digest import file_digest
from trainsync.storage.objects import commits, inspecting, keys
from trainsync.storage.objects.bucket import ObjectBucket
from trainsync.storage.objects.live import references
from trainsync.storage.objects.live.records import StoredRecords
from trainsync.storage.objects.live.term import read_term
from trainsync.storage.saves.receipts import Participant, Receipt

from tests.unit.checkpoint.save.places.incremental import URL, context

CHECKPOINT = SaveKind.CHECKPOINT
MODEL = "actor/model_world_size_1_rank_0.pt"
MIB = 1 << 20
FROZEN = 7  # MiB, beside one that is trained
ALL = FROZEN + 1


@pytest.fixture
def ctx(bucket: ObjectBucket) -> Iterator[RunContext]:
    with context() as made:
        yield made


class Training:
    """A model of `ALL` layers of a MiB each, of which the first ``frozen`` do not change."""

    def __init__(self, ctx: RunContext, frozen: int = FROZEN) -> None:
        self.saving = ctx.coordinator(0, 1)
        self.frozen = frozen
        self.saved: dict[int, dict[str, torch.Tensor]] = {}
        self.layers = {
            f"layer{n}": torch.full((MIB // 4,), float(n)) + torch.arange(MIB // 4)
            for n in range(ALL)
        }

    def save(self, step: int) -> None:
        for number, name in enumerate(self.layers):
            if number >= self.frozen:
                self.layers[name] = self.layers[name] + step
        self.saved[step] = dict(self.layers)
        self.saving.register(step, checkpoint_participants=all_ranks("model", world_size=1))
        self.saving.save_async("model", self.layers, step)
        self.saving.finish(step, timeout=60)


def base_step(bucket: ObjectBucket, step: int) -> int | None:
    """The step that put the object which has a part of the model's file of ``step``."""
    base = commits.read_manifest(bucket, CHECKPOINT, step).bases.get(MODEL)
    return None if base is None else keys.step_of(base.key)


def objects(bucket: ObjectBucket) -> int:
    """Bytes of all shards."""
    return sum(info.bytes for info in bucket.below(keys.OBJECTS))


def load(bucket: ObjectBucket, step: int) -> dict[str, torch.Tensor]:
    """From the store, as if ``step`` were the newest."""
    found = commits.read_manifest(bucket, CHECKPOINT, step)
    files = stored.StoredFiles.named_by(URL, found)
    made = Resume(step, Path(URL), found.manifest, lambda text: True, store=files)
    loaded: dict[str, torch.Tensor] = load_shard(made, MODEL)
    return loaded


def check(bucket: ObjectBucket, saved: dict[int, dict[str, torch.Tensor]]) -> None:
    """Every committed step is whole, and has what was saved."""
    found = inspecting.check_all_sizes(bucket)
    for one in inspecting.check_digests(bucket, found, threads=2):
        assert one.save.findings == ()
    for step in commits.committed_steps(bucket, CHECKPOINT):
        loaded = load(bucket, step)
        assert all(torch.equal(loaded[name], value) for name, value in saved[step].items())


def test_frozen_tensors_of_a_component_are_written_once(
    ctx: RunContext, bucket: ObjectBucket
) -> None:
    training = Training(ctx)
    training.save(1)
    first = objects(bucket)
    assert first > ALL * MIB
    for step in (2, 3, 4):
        before = objects(bucket)
        training.save(step)
        assert base_step(bucket, step) == 1
        assert objects(bucket) - before < 1.6 * MIB, "the trained layer, and the blocks it is in"
    check(bucket, training.saved)
    stats = training.saving.stats
    kept = sum(commits.read_manifest(bucket, CHECKPOINT, step).kept_bytes for step in (2, 3, 4))
    assert stats.kept_bytes == kept > 3 * (FROZEN - 0.5) * MIB
    assert stats.written_bytes == objects(bucket)
    assert references.pinned(bucket) == set(), "all saves have ended"
    term = read_term(bucket)
    assert term is not None
    assert term.version == 2, "releases that would remove shared objects refuse the run"


def test_what_older_releases_would_misread_they_refuse(
    ctx: RunContext, bucket: ObjectBucket
) -> None:
    training = Training(ctx)
    for step in (1, 2):
        training.save(step)
    raw = bucket.get(keys.manifest(CHECKPOINT, 2)).data
    assert b'"version": 2' in raw
    assert b'"version": 1' in bucket.get(keys.manifest(CHECKPOINT, 1)).data


def test_a_file_that_is_as_before_is_kept_with_its_base(
    ctx: RunContext, bucket: ObjectBucket
) -> None:
    training = Training(ctx)
    for step in (1, 2):
        training.save(step)
    training.frozen = ALL
    training.save(3)
    found, older = (commits.read_manifest(bucket, CHECKPOINT, step) for step in (3, 2))
    assert found.kept == {path: older.keys[path] for path in (MODEL, beside(MODEL))}
    assert found.bases == older.bases
    assert found.kept_bytes == found.manifest.bytes
    check(bucket, training.saved)


@pytest.mark.parametrize("keep", ["1", "5"])
def test_a_base_outlives_its_step_as_long_as_a_step_needs_it(
    bucket: ObjectBucket, keep: str
) -> None:
    with context(TRAINSYNC_CHECKPOINT_MAX_TO_KEEP=keep) as ctx:
        training = Training(ctx)
        for step in (1, 2, 3):
            training.save(step)
        assert base_step(bucket, 3) == 1
        check(bucket, training.saved)
        if keep == "1":
            put = {keys.step_of(info.key) for info in bucket.below(keys.OBJECTS)}
            assert put == {1, 3}
            training.frozen = 0
            training.save(4)
            assert {keys.step_of(info.key) for info in bucket.below(keys.OBJECTS)} == {4}
            check(bucket, training.saved)


def test_a_monitor_that_reads_before_it_commits_reads_both_objects(bucket: ObjectBucket) -> None:
    with context(**{env.CHECKPOINT_VERIFY: "digest"}) as ctx:
        training = Training(ctx)
        for step in (1, 2):
            training.save(step)
        flip(bucket, commits.read_manifest(bucket, CHECKPOINT, 1).keys[MODEL])
        with pytest.raises(SaveAbortedError, match="has digest"):
            training.save(3)
        training.save(4)
    assert base_step(bucket, 2) == 1
    assert base_step(bucket, 4) is None, "after an abort all is written"
    assert commits.committed_steps(bucket, CHECKPOINT) == [1, 2, 4]


def test_after_a_restart_the_rest_is_kept_still(bucket: ObjectBucket) -> None:
    saved = {}
    with context() as ctx:
        training = Training(ctx)
        for step in (1, 2):
            training.save(step)
        saved |= training.saved
    for step in (3, 4):  # a start each
        with context() as ctx:
            found = ctx.resume()
            assert found is not None
            assert found.step == step - 1
            again = Training(ctx)
            again.layers = load_shard(found, MODEL)
            again.save(step)
            saved |= again.saved
            assert base_step(bucket, step) == 1
            assert again.saving.stats.written_bytes < 1.6 * MIB
    check(bucket, saved)


def test_what_all_changes_is_written_plainly(ctx: RunContext, bucket: ObjectBucket) -> None:
    training = Training(ctx, frozen=0)
    for step in (1, 2, 3):
        training.save(step)
        assert commits.read_manifest(bucket, CHECKPOINT, step).bases == {}
        assert b'"version": 1' in bucket.get(keys.manifest(CHECKPOINT, step)).data
    check(bucket, training.saved)


def test_layers_that_are_frozen_later_get_a_base(ctx: RunContext, bucket: ObjectBucket) -> None:
    training = Training(ctx, frozen=0)
    for step in (1, 2):
        training.save(step)
    training.frozen = FROZEN
    for step in (3, 4, 5):
        training.save(step)
    assert base_step(bucket, 3) is None, "the first of them is what shows it"
    assert [base_step(bucket, step) for step in (4, 5)] == [3, 3]
    check(bucket, training.saved)


def test_damage_is_blamed_on_the_object_that_has_it(ctx: RunContext, bucket: ObjectBucket) -> None:
    training = Training(ctx)
    for step in (1, 2, 3):
        training.save(step)
    found = inspecting.check_all_sizes(bucket)
    own = commits.read_manifest(bucket, CHECKPOINT, 2).keys[MODEL]
    sound = flip(bucket, own)
    checked = inspecting.check_digests(bucket, found, threads=2)
    assert [one.save.valid for one in checked] == [True, False, True]
    assert set(inspecting.damaged_objects(checked)) == {own}
    bucket.delete([own])
    bucket.create(own, sound)
    base = commits.read_manifest(bucket, CHECKPOINT, 1).keys[MODEL]
    flip(bucket, base)
    checked = inspecting.check_digests(bucket, found[2:], threads=2)
    damaged = inspecting.damaged_objects(checked)
    assert set(damaged) == {base}
    for one in found[:2]:
        assert not inspecting.with_damage(one, damaged).save.valid, "they have it, too"


def test_a_base_that_is_gone_is_damage_and_the_next_save_is_whole(
    ctx: RunContext, bucket: ObjectBucket
) -> None:
    training = Training(ctx)
    for step in (1, 2):
        training.save(step)
    base = commits.read_manifest(bucket, CHECKPOINT, 1).keys[MODEL]
    bucket.delete([base])
    (finding,) = inspecting.size_findings(bucket, commits.read_manifest(bucket, CHECKPOINT, 2))
    assert finding.objects == (base,)
    assert f"{base} is missing" in finding.message
    training.save(3)
    assert base_step(bucket, 3) is None
    assert inspecting.size_findings(bucket, commits.read_manifest(bucket, CHECKPOINT, 3)) == []


def test_a_copy_reads_the_whole_file(ctx: RunContext, bucket: ObjectBucket) -> None:
    training = Training(ctx)
    for step in (1, 2):
        training.save(step)
    with StoreSource(bucket).reading(CHECKPOINT, 2) as reading:
        (entry,) = (entry for entry in reading.manifest.files if entry.path == MODEL)
        assert sum(len(block) for block in reading.blocks(entry)) == entry.bytes > ALL * MIB


def test_the_receipt_says_what_older_releases_would_not_understand(
    ctx: RunContext, bucket: ObjectBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    receipts: list[Receipt] = []
    write = StoredRecords.write_receipt

    def note(records: StoredRecords, receipt: Receipt) -> None:
        receipts.append(receipt)
        write(records, receipt)

    monkeypatch.setattr(StoredRecords, "write_receipt", note)
    training = Training(ctx)
    for step in (1, 2):
        training.save(step)
    first, second = receipts
    assert second.participant == Participant("model", 0)
    assert (first.version, second.version) == (1, 2)
    assert first.based == {}
    assert second.written_bytes + second.kept_bytes == sum(e.bytes for e in second.files)
    assert second.kept_bytes > (FROZEN - 0.5) * MIB


def flip(bucket: ObjectBucket, key: str) -> bytes:
    """Change a bit in the middle of an object; its bytes before."""
    data = bytearray(sound := bucket.get(key).data)
    data[len(data) // 2] ^= 1
    bucket.delete([key])
    bucket.create(key, bytes(data))
    return sound


def test_memory_has_the_whole_file(
    bucket: ObjectBucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = tmp_path / "memory"
    memory.mkdir()
    monkeypatch.setattr(shared, "open_run_store", lambda url, limits=None: bucket)
    environ = {env.CHECKPOINT_MEMORY: "64Mi", env.CHECKPOINT_MEMORY_DIR: str(memory)}
    with context(**environ) as ctx:
        training = Training(ctx)
        for step in (1, 2):
            training.save(step)
        files = commits.read_manifest(bucket, CHECKPOINT, 2).manifest.files
        (expected,) = (entry.digest for entry in files if entry.path == MODEL)
        assert base_step(bucket, 2) == 1
        kept = {file_digest(path) for path in memory.rglob("*") if path.is_file()}
        assert expected in kept
