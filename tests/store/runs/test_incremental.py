"""Saves that keep what has not changed, on a real S3 server, with kills on the way."""

import os
import re
from typing import Any

import pytest
import torch
from trainsync import RunContext, all_ranks
from trainsync.api.protocol import SaveKind
from trainsync.checkpoint.load.loading import load_shard
from trainsync.storage.objects import commits, keys
from trainsync.storage.objects.live import references

from tests.distributed.ranks import run_ranks, values_of
from tests.store.conftest import Place
from tests.store.processes import frozen_layers, frozen_tensors
from tests.store.processes.forked import run_killed
from tests.store.processes.incremental_job import MODEL, REFERENCE, save, states
from tests.unit.cli.commands import document, findings

CHECKPOINT = SaveKind.CHECKPOINT


@pytest.fixture(autouse=True)
def incremental(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINSYNC_CHECKPOINT_INCREMENTAL", "true")


def check_whole(place: Place) -> None:
    """Every step that is committed has all its bytes."""
    assert [
        found for found in findings("verify", place.url(), code=0) if found[0] == "damage"
    ] == []
    bucket = place.open()
    for step in commits.committed_steps(bucket, CHECKPOINT):
        stored = commits.read_manifest(bucket, CHECKPOINT, step)
        assert None not in {bucket.size(key) for key in stored.objects}


def check_loads(ctx: RunContext, step: int) -> None:
    found = ctx.resume()
    assert found is not None
    assert found.step == step
    for path, name in ((MODEL, "model"), (REFERENCE, "reference")):
        loaded = load_shard(found, path)
        assert all(torch.equal(loaded[key], value) for key, value in states(step)[name].items())


def test_a_frozen_half_is_uploaded_once(place: Place) -> None:
    with RunContext.from_env(place.url()) as ctx:
        saving = ctx.coordinator(0, 1)
        for step in (1, 2, 3):
            save(saving, step)
        stats = saving.stats
    stored = commits.read_manifest(place.open(), CHECKPOINT, 3)
    assert stats.kept_bytes == 2 * stored.kept_bytes
    assert stats.written_bytes == sum(i.bytes for i in place.open().below(keys.OBJECTS))
    shown = document("show", place.url(), "--step", "3", code=0)["saves"][0]
    assert shown["keptBytes"] == stored.kept_bytes
    assert {f["path"]: f["writtenBy"] for f in shown["fileList"]}[REFERENCE] == 1
    check_whole(place)
    with RunContext.from_env(place.url()) as ctx:
        check_loads(ctx, 3)


def test_of_a_model_what_is_frozen_in_it_is_uploaded_once(place: Place) -> None:
    bucket = place.open()
    layers = {f"layer{n}": torch.randn(1 << 18) for n in range(20)}  # 20 MiB
    sizes = []
    with RunContext.from_env(place.url()) as ctx:
        saving = ctx.coordinator(0, 1)
        for step in (1, 2, 3):
            for name in ("layer18", "layer19"):
                layers[name] = layers[name] + step
            saving.register(step, checkpoint_participants=all_ranks("model", world_size=1))
            saving.save_async("model", layers, step)
            saving.finish(step, timeout=60)
            sizes.append(sum(info.bytes for info in bucket.below(keys.step_objects(step))))
    assert sizes[0] > 20 << 20
    assert max(sizes[1:]) < 2.6 * (1 << 20), "a tenth, and the blocks at its ends"
    shown = document("show", place.url(), "--step", "3", code=0)["saves"][0]
    assert shown["keptBytes"] > 17 << 20
    (file,) = (file for file in shown["fileList"] if file["path"] == MODEL)
    assert (file["writtenBy"], file["keptOf"]) == (3, 1)
    assert file["keptBytes"] == shown["keptBytes"]
    check_whole(place)
    with RunContext.from_env(place.url()) as ctx:
        found = ctx.resume()
        assert found is not None
        loaded = load_shard(found, MODEL)
        assert all(torch.equal(loaded[name], value) for name, value in layers.items())


def test_a_copy_and_a_prune_leave_whole_steps(place: Place, tmp_path: Any) -> None:
    with RunContext.from_env(place.url()) as ctx:
        saving = ctx.coordinator(0, 1)
        for step in (1, 2, 3):
            save(saving, step)
    other = place.url("runs/copy")
    document("cp", place.url(), other, "--step", "3", code=0)
    document("cp", place.url(), str(tmp_path / "run"), "--step", "3", code=0)
    document("prune", place.url(), "--keep", "1", "--yes", code=0)
    assert commits.committed_steps(place.open(), CHECKPOINT) == [3]
    check_whole(place)
    assert findings("verify", other, code=0) == []
    assert findings("verify", str(tmp_path / "run"), code=0) == []
    (copied,) = document("show", other, "--step", "3", code=0)["saves"]
    assert copied["keptBytes"] == 0, "a copy has all its bytes"


@pytest.mark.parametrize(
    "point",
    [
        "live.pinned",
        "live.shard",
        "live.receipt",
        "live.intent",
        "store.manifest",  # between the manifest and the pointer
        "live.outcome",
        "live.removing",
        "live.uncommitted",  # amid retention
        "live.unnamed",
    ],
)
def test_a_kill_at_any_point_leaves_whole_steps_that_load(
    place: Place, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINSYNC_CHECKPOINT_MAX_TO_KEEP", "1")
    run_killed("tests.store.processes.incremental_job", place.url(), point)
    bucket = place.open()
    check_whole(place)
    with RunContext.from_env(place.url()) as ctx:
        found = ctx.resume()
        assert found is not None
        check_loads(ctx, found.step)
        saving = ctx.coordinator(0, 1)
        for step in (found.step + 1, found.step + 2):
            save(saving, step)
        check_loads(ctx, found.step + 2)
        check_whole(place)
    assert references.pinned(bucket) == set()
    stored = commits.read_manifest(bucket, CHECKPOINT, found.step + 2)
    assert re.match(r"objects/global_step_\d+/run-0-", stored.kept[REFERENCE]), (
        "what the attempt before has put"
    )
    objects = {info.key for info in bucket.below(keys.OBJECTS)}
    assert stored.bases.keys() == {MODEL}
    assert objects == stored.objects, "nothing is left of what went"


@pytest.mark.parametrize("point", ["live.pinned", "live.receipt", "live.intent", "live.unnamed"])
def test_a_kill_in_the_first_save_after_a_restart_leaves_whole_steps(
    place: Place, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAINSYNC_CHECKPOINT_MAX_TO_KEEP", "1")
    with RunContext.from_env(place.url()) as ctx:
        save(ctx.coordinator(0, 1), 1)
    shared = commits.read_manifest(place.open(), CHECKPOINT, 1).keys[REFERENCE]
    run_killed("tests.store.processes.incremental_job", place.url(), point, "resumes")
    check_whole(place)
    with RunContext.from_env(place.url()) as ctx:
        found = ctx.resume()
        assert found is not None
        assert found.step == (1 if point in ("live.pinned", "live.receipt") else 2)
        check_loads(ctx, found.step)
        save(ctx.coordinator(0, 1), found.step + 1)
        check_loads(ctx, found.step + 1)
    check_whole(place)
    bucket = place.open()
    assert references.pinned(bucket) == set()
    stored = commits.read_manifest(bucket, CHECKPOINT, found.step + 1)
    assert stored.kept[REFERENCE] == shared, "it is uploaded once, by three attempts"
    assert {info.key for info in bucket.below(keys.OBJECTS)} == stored.objects


@pytest.mark.timeout(240)
def test_frozen_layers_of_two_ranks_are_uploaded_once_and_load_bit_by_bit(place: Place) -> None:
    environ = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    environ["TRAINSYNC_CHECKPOINT_INCREMENTAL"] = "true"
    first = values_of(run_ranks(frozen_layers.run, place.url(), environ, 3, seconds=100))
    for rank in first:
        assert rank["kept"] > 2 * (4 << 20), "half of 8 MiB, twice"
        assert rank["written"] < 4.1 * (4 << 20), "all of it once, and what is trained twice more"
    check_whole(place)
    again = values_of(run_ranks(frozen_layers.run, place.url(), environ, 4, seconds=100))
    for before, after in zip(first, again, strict=True):
        assert after["before"] == before["after"]
        assert after["after"] != after["before"]
        assert after["kept"] > 4 << 20, "the frozen half, also after a restart"
        assert after["written"] < 1.1 * (4 << 20)
    check_whole(place)


@pytest.mark.timeout(240)
def test_a_model_with_frozen_layers_is_loaded_by_other_numbers_of_ranks(
    place: Place,
) -> None:
    environ = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    environ["TRAINSYNC_CHECKPOINT_INCREMENTAL"] = "true"
    first = values_of(run_ranks(frozen_tensors.run, place.url(), environ, 2, seconds=100))
    for rank in first:
        assert rank["written"] < 1.35 * (8 << 20), "all once, then a quarter, of 8 MiB"
    stored = commits.read_manifest(place.open(), CHECKPOINT, 2)
    assert len(stored.bases) == 2, "of each rank's file"
    check_whole(place)
    ranks = run_ranks(frozen_tensors.run, place.url(), environ, 2, world_size=3, seconds=100)
    again = values_of(ranks)
    assert {rank["digest"] for rank in again} == {rank["digest"] for rank in first}
