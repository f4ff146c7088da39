"""Commits, pointers, the probe and removal, in a store in memory."""

import json
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from obstore.exceptions import AlreadyExistsError
from obstore.store import MemoryStore
from trainsync.storage.errors import DamagedFileError, PromotionConflictError, StepGoneError
from trainsync.storage.objects import bucket as bucket_module
from trainsync.storage.objects import commits, inspecting, keys, manifests, removal
from trainsync.storage.objects.bucket import ObjectBucket
from trainsync.storage.objects.errors import (
    StoreRefusedError,
    StoreUnavailableError,
    UnconditionalStoreError,
)
from trainsync.storage.objects.live import references
from trainsync.storage.objects.probe import require_conditional_puts
from trainsync.storage.saves.receipts import Participant

from tests.unit.storage.objects.memory import CHECKPOINT, STATE_DICT, manifest_of, memory, save

KEY = "objects/global_step_5/0-aaaaaaaa-w1/actor/rank_0.pt"


class Regardless(MemoryStore):
    """Puts, whatever the condition is, from the ``honest``-th conditional put on."""

    honest = 0

    def put(self, path: str, file: Any, **given: Any) -> Any:
        if given.get("mode") is not None:
            type(self).honest -= 1
            if type(self).honest < 0:
                given.pop("mode")
        return super().put(path, file, **given)


@pytest.mark.parametrize(("honest", "said"), [(0, "If-None-Match"), (3, "If-Match")])
def test_a_store_that_puts_regardless_is_refused(honest: int, said: str) -> None:
    Regardless.honest = honest
    bucket = memory(Regardless())
    with pytest.raises(UnconditionalStoreError, match="does not honour conditional puts") as caught:
        require_conditional_puts(bucket)
    assert said in str(caught.value)
    assert bucket.below("") == []


class Remembers(MemoryStore):
    """A bucket with versions of a server that takes the mark of a removal for an object."""

    def __init__(self) -> None:
        self.removed: set[str] = set()

    def put(self, path: str, file: Any, **given: Any) -> Any:
        if given.get("mode") == "create" and path in self.removed:
            raise AlreadyExistsError("412")
        return super().put(path, file, **given)

    def delete(self, paths: Any) -> None:
        self.removed |= set(paths)
        super().delete(paths)


def test_a_store_that_refuses_an_object_where_one_was_removed_holds_no_run() -> None:
    bucket = memory(Remembers())
    require_conditional_puts(bucket)
    with pytest.raises(UnconditionalStoreError, match="where one was removed, as some servers do"):
        require_conditional_puts(bucket, anew=True)
    require_conditional_puts(memory(), anew=True)


def test_a_save_is_committed_once_and_the_pointer_follows() -> None:
    bucket = memory()
    save(bucket, manifest_of(5))
    stored = commits.read_manifest(bucket, CHECKPOINT, 5)
    assert stored.manifest == manifest_of(5)
    assert commits.committed_pairs(bucket) == [(5, CHECKPOINT)]
    assert commits.read_pointer(bucket, CHECKPOINT) == 5
    assert commits.read_pointer(bucket, STATE_DICT) is None
    save(bucket, manifest_of(5), writer="w2")  # the same by another process: the first stays
    assert commits.read_manifest(bucket, CHECKPOINT, 5) == stored
    with pytest.raises(PromotionConflictError, match="is another save, of attempt 0"):
        save(bucket, manifest_of(5, attempt=1), writer="w3")
    assert commits.read_manifest(bucket, CHECKPOINT, 5) == stored
    with pytest.raises(StepGoneError, match="state_dict 5 is not committed in memory://"):
        commits.read_manifest(bucket, STATE_DICT, 5)


def test_a_mark_that_reserves_a_key_counts_for_nothing_and_gives_way_to_a_save() -> None:
    bucket = memory()
    save(bucket, manifest_of(5))
    for kind, step in ((CHECKPOINT, 7), (STATE_DICT, 5)):
        commits.reserve(bucket, kind, step)
        assert bucket.size(keys.manifest(kind, step)) == manifests.RESERVED_BYTES
    bucket.replace(keys.pointer(CHECKPOINT), b"7\n", bucket.get(keys.pointer(CHECKPOINT)))
    assert commits.committed_pairs(bucket) == [(5, CHECKPOINT)]
    assert commits.known_steps(bucket, CHECKPOINT) == [5]
    with pytest.raises(StepGoneError, match="checkpoint 7 is not committed"):
        commits.read_manifest(bucket, CHECKPOINT, 7)
    assert [one.save.step for one in inspecting.check_all_sizes(bucket)] == [5]
    assert not references.pin(bucket, "run/saves/0-aaaaaaaa", 7, Participant("model", 0))
    bucket.delete([info.key for info in bucket.below(keys.RUN)])
    assert len(references.named(bucket)) == 1
    save(bucket, manifest_of(7))
    assert commits.committed_steps(bucket, CHECKPOINT) == [5, 7]
    assert references.remove(bucket, 5)
    assert [info.key for info in bucket.below(keys.MANIFESTS)] == [keys.manifest(CHECKPOINT, 7)]


def test_a_manifest_takes_the_place_of_the_mark_that_reserved_its_key_alone() -> None:
    bucket = memory()
    first = commits.reserve(bucket, CHECKPOINT, 5)
    second = commits.reserve(bucket, CHECKPOINT, 5)
    with pytest.raises(StoreUnavailableError, match="another process replaces"):
        commits.commit(bucket, manifest_of(5), {"actor/rank_0.pt": KEY}, there=first)
    assert commits.committed_steps(bucket, CHECKPOINT) == []
    stored = commits.commit(bucket, manifest_of(5), {"actor/rank_0.pt": KEY}, there=second)
    assert commits.read_manifest(bucket, CHECKPOINT, 5) == stored
    assert (
        commits.reserve(bucket, CHECKPOINT, 5).data == bucket.get(keys.manifest(CHECKPOINT, 5)).data
    ), "a save that is committed stays"


def test_what_is_no_manifest_is_not_listed() -> None:
    bucket = memory()
    for key in ("x.json", "global_step_01.json", "global_step_3", "global_step_4.json.bak"):
        bucket.create(f"{keys.manifests(CHECKPOINT)}/{key}", b"x")
    assert commits.committed_pairs(bucket) == []


@pytest.mark.parametrize("text", ["", "x", "-1", "1.0", "9" * 200, "9007199254740993"])
def test_a_pointer_that_names_no_step_stays(text: str) -> None:
    bucket = memory()
    bucket.create(keys.pointer(CHECKPOINT), text.encode())
    with pytest.raises(DamagedFileError, match="expected a step"):
        commits.move_pointer(bucket, CHECKPOINT, 5)
    assert bucket.get(keys.pointer(CHECKPOINT)).data == text.encode()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"version": 3}, "version"),
        ({"version": 2}, "is of version 2, with 0 bases"),
        ({"step": 6}, "is the manifest of checkpoint 6"),
        ({"files": []}, "files"),
        ({"path": "../x"}, "plain relative path"),
        ({"path": "MANIFEST.checkpoint.json"}, "monitor's own"),
        ({"key": "../../other/x"}, "plain relative path"),
        ({"key": "manifests/checkpoint/global_step_5.json"}, "is not the key of a shard"),
        ({"digest": "md5:00"}, "digest"),
    ],
)
def test_a_manifest_that_leads_elsewhere_is_damaged(change: dict[str, object], why: str) -> None:
    entry = manifest_of(5)
    data = json.loads(manifests.encode(entry, {entry.files[0].path: "objects/global_step_5/w/a"}))
    for name, value in change.items():
        (data["files"][0] if name in data["files"][0] else data)[name] = value
    with pytest.raises(DamagedFileError) as caught:
        manifests.decode(json.dumps(data).encode(), CHECKPOINT, 5)
    assert why in str(caught.value)


def test_unknown_keys_are_passed_over() -> None:
    entry = manifest_of(5)
    data = json.loads(manifests.encode(entry, {entry.files[0].path: "objects/global_step_5/w/a"}))
    data["later"] = data["files"][0]["later"] = 1
    assert manifests.decode(json.dumps(data).encode(), CHECKPOINT, 5).manifest == entry


def found(bucket: ObjectBucket) -> list[inspecting.StoredSave]:
    return inspecting.check_all_sizes(bucket)


def test_what_training_made_last_stays_and_so_does_what_a_pointer_names() -> None:
    bucket = memory()
    for step in (10, 20, 30):
        save(bucket, manifest_of(step))
    later = replace(manifest_of(15, attempt=1), created_at=manifest_of(90).created_at)
    save(bucket, later)  # trained again after a resume from 10
    assert removal.choose(bucket, found(bucket), 1) == [10, 20]
    assert removal.choose(bucket, found(bucket), 2) == [10, 20]
    assert removal.choose(bucket, found(bucket), 3) == [10]
    assert removal.choose(bucket, found(bucket), 9) == []


def test_a_step_goes_with_the_objects_that_it_alone_names() -> None:
    bucket = memory()
    for step in (10, 20):
        save(bucket, manifest_of(step))
    seen = found(bucket)
    assert removal.remove(bucket, 10, seen)
    assert [info.key for info in bucket.below("objects")] == [
        "objects/global_step_20/0-aaaaaaaa-w1/actor/rank_0.pt"
    ]
    assert not removal.remove(bucket, 20, seen), "the pointer names it"
    assert commits.committed_pairs(bucket) == [(20, CHECKPOINT)]


def test_objects_that_another_step_names_too_stay() -> None:
    bucket = memory()
    save(bucket, manifest_of(10))
    (shared,) = (info.key for info in bucket.below("objects"))
    commits.commit(bucket, manifest_of(20), {"actor/rank_0.pt": shared})
    assert removal.remove(bucket, 10, found(bucket))
    assert [save.save.valid for save in found(bucket)] == [True]


def test_a_step_that_was_saved_anew_meanwhile_stays() -> None:
    bucket = memory()
    for step in (10, 20):
        save(bucket, manifest_of(step))
    seen = found(bucket)
    bucket.delete([keys.manifest(CHECKPOINT, 10)])
    save(bucket, manifest_of(10, attempt=1), writer="w2")
    assert not removal.remove(bucket, 10, seen)
    assert commits.read_manifest(bucket, CHECKPOINT, 10).manifest.attempt == 1


def test_only_old_objects_without_a_manifest_are_orphans(monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = memory()
    save(bucket, manifest_of(10))
    bucket.create("objects/global_step_10/0-aaaaaaaa-w9/a", b"left")
    assert removal.orphans(bucket) == []
    assert [f.path for f in inspecting.unlisted_findings(bucket, found(bucket))] == [
        "objects/global_step_10/0-aaaaaaaa-w9"
    ]
    monkeypatch.setattr(removal, "ORPHAN_SECONDS", -timedelta(hours=1).total_seconds())
    (orphan,) = removal.orphans(bucket)
    assert (orphan.step, orphan.bytes) == (10, 4)
    removal.remove_orphans(bucket, [orphan])
    assert [one.save.valid for one in found(bucket)] == [True]
    bucket.create("objects/global_step_10/0-aaaaaaaa-w9/a", b"left")
    bucket.create(keys.manifest(CHECKPOINT, 99), b"{")
    assert removal.orphans(bucket) == [], "it may be the damaged manifest's"


def test_a_record_that_get_would_refuse_is_not_put(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket_module, "_LARGEST_RECORD", 4)
    bucket = memory()
    bucket.create("record", b"1234")
    with pytest.raises(StoreRefusedError, match=r"would have 5 bytes, at most 4 are read"):
        bucket.replace("record", b"12345", bucket.get("record"))
    assert bucket.get("record").data == b"1234"
    with pytest.raises(StoreRefusedError, match=r"would have 5 bytes, at most 4 are read"):
        bucket.create("other", b"12345")
    assert bucket.find("other") is None
