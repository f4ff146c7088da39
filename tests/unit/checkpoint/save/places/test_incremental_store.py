"""Saves into a store that do not write again what has not changed."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from trainsync import RunContext, all_ranks
from trainsync.api.protocol import SaveKind
from trainsync.checkpoint.load import resume, stored
from trainsync.checkpoint.load.loading import load_shard
from trainsync.checkpoint.save.places.unchanged import KnownFile, KnownFiles
from trainsync.storage.block_digests import BlockDigests, beside
from trainsync.storage.objects import commits, inspecting, keys
from trainsync.storage.objects.bucket import ObjectBucket
from trainsync.storage.objects.live import names, references
from trainsync.storage.objects.live.term import read_term
from trainsync.storage.saves.receipts import FileEntry, Participant

from tests.unit.checkpoint.save.places.incremental import URL, context

CHECKPOINT = SaveKind.CHECKPOINT
MODEL = "actor/model_world_size_1_rank_0.pt"
REFERENCE = "actor/reference_world_size_1_rank_0.pt"
ONE = Participant("reference", 0)
NO_BLOCKS = BlockDigests(1 << 18, b"")
NAMES = ("model", "reference")


@pytest.fixture
def ctx(bucket: ObjectBucket) -> Iterator[RunContext]:
    with context() as made:
        yield made


class Training:
    """A model that changes with every step, beside one that is ``frozen``."""

    def __init__(self, ctx: RunContext, frozen: float = 0.0) -> None:
        self.saving = ctx.coordinator(0, 1)
        self.frozen = frozen

    def states(self, step: int) -> dict[str, dict[str, torch.Tensor]]:
        values = torch.arange(float(1 << 19))  # 2 MiB
        return {"model": {"w": values + step}, "reference": {"w": values + self.frozen}}

    def save(self, step: int) -> None:
        everyone = all_ranks(*NAMES, world_size=1)
        self.saving.register(step, checkpoint_participants=everyone)
        for name, state in self.states(step).items():
            self.saving.save_async(name, state, step)
        self.saving.finish(step, timeout=60)


def kept(bucket: ObjectBucket, step: int) -> dict[str, int]:
    """The files that a step has of another one, and of which."""
    found = commits.read_manifest(bucket, CHECKPOINT, step).kept
    return {path: keys.step_of(key) for path, key in found.items()}


def steps_of_objects(bucket: ObjectBucket) -> set[int]:
    return {keys.step_of(info.key) for info in bucket.below(keys.OBJECTS)}


def test_a_component_that_has_not_changed_is_not_written_again(
    ctx: RunContext, bucket: ObjectBucket
) -> None:
    training = Training(ctx)
    for step in (1, 2, 3):
        training.save(step)
    assert kept(bucket, 1) == {}
    for step in (2, 3):
        assert kept(bucket, step) == {REFERENCE: 1, beside(REFERENCE): 1}
        state = training.states(step)
        assert torch.equal(_load(ctx, bucket, step, MODEL), state["model"]["w"])
        assert torch.equal(_load(ctx, bucket, step, REFERENCE), state["reference"]["w"])
    stats = training.saving.stats
    once = commits.read_manifest(bucket, CHECKPOINT, 3).kept_bytes
    assert once > 2 << 20
    assert stats.kept_bytes == 2 * once
    assert stats.written_bytes == sum(info.bytes for info in bucket.below(keys.OBJECTS))
    assert references.pinned(bucket) == set(), "all saves have ended"


def test_an_object_that_is_gone_is_written_again(ctx: RunContext, bucket: ObjectBucket) -> None:
    training = Training(ctx)
    training.save(1)
    training.save(2)
    bucket.delete([commits.read_manifest(bucket, CHECKPOINT, 1).keys[REFERENCE]])
    training.save(3)
    assert kept(bucket, 3) == {}
    assert inspecting.size_findings(bucket, commits.read_manifest(bucket, CHECKPOINT, 3)) == []


def test_after_an_aborted_save_the_next_one_is_written_in_full() -> None:
    known, file = KnownFiles(), KnownFile(1, (FileEntry(MODEL, 1, "xxh3-128:00"),), (), NO_BLOCKS)
    for step in (1, 2):
        known.add(ONE, replace(file, step=step))
    assert known.newest(ONE, MODEL, 3, {1: True, 2: False}.get) is None
    found = known.newest(ONE, MODEL, 3, {1: True}.get)  # the second has not ended
    assert found is not None
    assert found.step == 1


def test_objects_named_by_a_step_stay_while_a_save_may_have_them_of_one_that_is_gone(
    ctx: RunContext, bucket: ObjectBucket
) -> None:
    training = Training(ctx)
    training.save(1)
    training.save(2)
    shared = commits.read_manifest(bucket, CHECKPOINT, 1).keys[REFERENCE]
    assert references.pin(bucket, names.save(0, "aaaaaaaa0", CHECKPOINT, 3), 1, ONE)
    bucket.delete([keys.manifest(CHECKPOINT, 1)])
    assert references.remove(bucket, 2)
    assert bucket.size(shared) is not None


def _load(ctx: RunContext, bucket: ObjectBucket, step: int, path: str) -> torch.Tensor:
    """From the store as if ``step`` were the newest."""
    found = commits.read_manifest(bucket, CHECKPOINT, step)
    files = stored.StoredFiles.named_by(URL, found)
    made = resume.Resume(step, Path(URL), found.manifest, lambda text: True, store=files)
    weight: torch.Tensor = load_shard(made, path)["w"]
    return weight


def test_a_component_that_changes_again_is_written_again(
    ctx: RunContext, bucket: ObjectBucket
) -> None:
    training = Training(ctx)
    training.save(1)
    training.frozen = 5.0
    training.save(2)
    training.save(3)
    assert kept(bucket, 2) == {}
    assert kept(bucket, 3) == {REFERENCE: 2, beside(REFERENCE): 2}


def test_without_the_option_everything_is_written(bucket: ObjectBucket) -> None:
    with RunContext.from_env(URL, environ={}) as ctx:
        training = Training(ctx)
        training.save(1)
        training.save(2)
    assert kept(bucket, 2) == {}


def test_objects_outlive_the_step_that_wrote_them(bucket: ObjectBucket) -> None:
    with context(TRAINSYNC_CHECKPOINT_MAX_TO_KEEP="1") as ctx:
        training = Training(ctx)
        for step in (1, 2, 3):
            training.save(step)
        assert commits.committed_steps(bucket, CHECKPOINT) == [3]
        assert steps_of_objects(bucket) == {1, 3}
        training.frozen = 5.0
        training.save(4)
        assert steps_of_objects(bucket) == {4}, "no step names the older ones any more"


@pytest.mark.parametrize("keep", ["1", "5"])
def test_a_process_that_resumes_writes_again_only_what_has_changed(
    bucket: ObjectBucket, keep: str
) -> None:
    environ = {"TRAINSYNC_CHECKPOINT_MAX_TO_KEEP": keep}
    with context(**environ) as ctx:
        training = Training(ctx)
        for step in (1, 2):
            training.save(step)
    for step in (3, 4):  # a start each
        with context(**environ) as ctx:
            found = ctx.resume()
            assert found is not None
            assert found.step == step - 1
            state = training.states(step)["reference"]["w"]
            assert torch.equal(load_shard(found, REFERENCE)["w"], state)
            again = Training(ctx)
            again.save(step)
            stored = commits.read_manifest(bucket, CHECKPOINT, step)
            assert kept(bucket, step) == {REFERENCE: 1, beside(REFERENCE): 1}
            assert again.saving.stats.kept_bytes == stored.kept_bytes
            assert references.pinned(bucket) == set()
    assert steps_of_objects(bucket) == ({1, 4} if keep == "1" else {1, 2, 3, 4})


def test_a_process_that_has_not_resumed_writes_in_full(bucket: ObjectBucket) -> None:
    with context() as ctx:
        Training(ctx).save(1)
    with context() as ctx:
        training = Training(ctx)
        for step in (2, 3):
            training.save(step)
    assert kept(bucket, 2) == {}
    assert kept(bucket, 3) == {REFERENCE: 2, beside(REFERENCE): 2}


def test_what_has_changed_over_a_restart_is_written(bucket: ObjectBucket) -> None:
    with context() as ctx:
        Training(ctx).save(1)
    with context() as ctx:
        ctx.resume()
        Training(ctx, frozen=5.0).save(2)
    assert kept(bucket, 2) == {}


@pytest.mark.parametrize("which", ["the file", "its blocks' digests", "their bytes"])
def test_what_is_gone_or_damaged_of_the_step_resumed_from_is_written(
    bucket: ObjectBucket, which: str
) -> None:
    with context() as ctx:
        Training(ctx).save(1)
    with context() as ctx:
        ctx.resume()
        found = commits.read_manifest(bucket, CHECKPOINT, 1).keys
        key = found[REFERENCE] if which == "the file" else found[beside(REFERENCE)]
        data = bytearray(bucket.get(key).data)
        bucket.delete([key])
        if which == "their bytes":
            data[-1] ^= 1
            bucket.create(key, bytes(data))
        Training(ctx).save(2)
    assert kept(bucket, 2) == {}
    assert inspecting.size_findings(bucket, commits.read_manifest(bucket, CHECKPOINT, 2)) == []


def test_small_states_are_written_again(ctx: RunContext, bucket: ObjectBucket) -> None:
    saving = ctx.coordinator(0, 1)
    for step in (1, 2):
        saving.register(step, checkpoint_participants=all_ranks("model", world_size=1))
        saving.save_async("model", {"w": torch.arange(1000.0)}, step)
        saving.finish(step, timeout=60)
    assert kept(bucket, 2) == {}


def test_releases_that_would_remove_shared_objects_refuse_the_run(bucket: ObjectBucket) -> None:
    with context() as ctx:
        training = Training(ctx)
        training.save(1)
        assert _version(bucket) == 1, "as every release reads it"
        training.save(2)
        assert _version(bucket) == 2
    with context() as other:
        Training(other).save(3)
    assert _version(bucket) == 2


def _version(bucket: ObjectBucket) -> int:
    term = read_term(bucket)
    assert term is not None
    return term.version


def test_verify_reads_an_object_once_and_blames_every_step_that_names_it(
    ctx: RunContext, bucket: ObjectBucket
) -> None:
    training = Training(ctx)
    for step in (1, 2, 3):
        training.save(step)
    found = inspecting.check_all_sizes(bucket)
    assert inspecting.bytes_to_read(found) == sum(info.bytes for info in bucket.below(keys.OBJECTS))
    key = commits.read_manifest(bucket, CHECKPOINT, 1).keys[REFERENCE]
    data = bytearray(bucket.get(key).data)
    data[1000] ^= 1
    bucket.delete([key])
    bucket.create(key, bytes(data))
    checked = inspecting.check_digests(bucket, found, threads=2)
    assert [one.save.valid for one in checked] == [False, False, False]
    paths = [finding.path for one in checked for finding in one.save.findings]
    assert paths == [f"global_step_{step}/{REFERENCE}" for step in (1, 2, 3)]
