"""Saves of a run whose checkpoints are in a store, and what is loaded from there."""

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from trainsync import RunContext, all_ranks
from trainsync.api.protocol import SaveKind
from trainsync.checkpoint.errors import (
    CorruptCheckpointError,
    SaveFailedError,
    UnsupportedPlaceError,
)
from trainsync.checkpoint.load.loading import load_shard
from trainsync.checkpoint.load.verify import verify
from trainsync.storage.objects import commits
from trainsync.storage.objects.bucket import ObjectBucket
from trainsync.storage.objects.errors import StoreUnavailableError

URL = "s3://bucket/runs/a"
SHARD = "actor/model_world_size_1_rank_0.pt"
STATE = {"weight": torch.arange(1000.0)}


@pytest.fixture
def ctx(bucket: ObjectBucket) -> Iterator[RunContext]:
    with RunContext.from_env(URL, environ={}) as made:
        yield made


def save(ctx: RunContext, step: int, source: Any = STATE, **given: Any) -> None:
    coordinator = ctx.coordinator(0, 1)
    coordinator.register(step, checkpoint_participants=all_ranks("model", world_size=1))
    coordinator.save_async("model", source, step, **given)
    coordinator.finish(step, timeout=60)


def test_a_run_goes_on_from_what_it_saved(
    ctx: RunContext, bucket: ObjectBucket, tmp_path: Path
) -> None:
    assert ctx.resume() is None
    save(ctx, 3, attachments={"note.json": b"{}", "empty": b""})
    ctx.close()
    with RunContext.from_env(URL, environ={}) as again:
        found = again.resume()
        assert found is not None
        assert (again.attempt, found.step) == (1, 3)
        assert torch.equal(load_shard(found, SHARD)["weight"], STATE["weight"])
        assert torch.equal(
            load_shard(pickle.loads(pickle.dumps(found)), SHARD)["weight"], STATE["weight"]
        )
        assert found.data_cursor() is None
    assert not [p for p in tmp_path.iterdir() if p.name.startswith("trainsync-load")]


def test_what_a_function_wrote_is_put_and_leaves_no_file(
    ctx: RunContext, bucket: ObjectBucket, tmp_path: Path
) -> None:
    def write(directory: Path) -> None:
        (directory / "deep").mkdir()
        (directory / "deep" / "name with spaces.bin").write_bytes(b"bytes")

    save(ctx, 1, write)
    saved = commits.read_manifest(bucket, SaveKind.CHECKPOINT, 1)
    assert list(saved.keys) == ["actor/deep/name with spaces.bin"]
    assert not [p for p in tmp_path.iterdir() if p.name.startswith("trainsync-part")]


def test_an_upload_that_fails_is_begun_anew_from_the_staged_copy(
    ctx: RunContext, bucket: ObjectBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload, failed = bucket.upload, []

    def fail_once(key: str, *arguments: Any, **given: Any) -> None:
        if not failed and key.endswith(".pt"):
            failed.append(key)
            raise StoreUnavailableError("it is away")
        upload(key, *arguments, **given)

    monkeypatch.setattr(bucket, "upload", fail_once)
    save(ctx, 1)
    (key,) = commits.read_manifest(bucket, SaveKind.CHECKPOINT, 1).keys.values()
    assert failed
    assert key != failed[0]


def test_what_needs_a_directory_is_refused_in_a_sentence(ctx: RunContext) -> None:
    coordinator = ctx.coordinator(0, 1)
    with pytest.raises(UnsupportedPlaceError, match="needs a run on a volume"):
        _ = coordinator.directory
    with pytest.raises((UnsupportedPlaceError, SaveFailedError), match="takes no argument"):
        coordinator.save_sync("model", lambda: None, 1)
    save(ctx, 2)
    found = ctx.resume_here()
    assert found is not None
    with pytest.raises(UnsupportedPlaceError, match="expected load_sharded or load_shard"):
        verify(found, SHARD)


def test_changed_bytes_are_not_loaded_and_are_not_resumed_from_again(
    ctx: RunContext, bucket: ObjectBucket
) -> None:
    save(ctx, 1)
    save(ctx, 2)
    ctx.close()
    (key,) = commits.read_manifest(bucket, SaveKind.CHECKPOINT, 2).keys.values()
    data = bytearray(bucket.get(key).data)
    data[200] ^= 1
    bucket.delete([key])
    bucket.create(key, bytes(data))
    with RunContext.from_env(URL, environ={}) as second:
        found = second.resume()
        assert found is not None
        with pytest.raises(
            CorruptCheckpointError, match=r"has digest .* the run's monitor was told"
        ):
            load_shard(found, SHARD)
    with RunContext.from_env(URL, environ={}) as third:
        found = third.resume()
        assert found is not None
        assert found.step == 1
