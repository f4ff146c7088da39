"""Repairs what a crash or a person left in a store; never touches a valid save.

Each change is one conditional put, on what was judged: another process that was faster wins.
A manifest cannot be renamed, so it is copied beside its objects, overwritten with `SET_ASIDE` on
the condition that it is still the one that was judged, and removed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime

from trainsync.api.protocol import SaveKind
from trainsync.api.words import counted
from trainsync.storage import digest
from trainsync.storage.errors import DamagedFileError
from trainsync.storage.inspect.repair import Action, ActionKind, RepairPlan
from trainsync.storage.objects import commits, inspecting, keys, removal
from trainsync.storage.objects.bucket import Blob, ObjectBucket
from trainsync.storage.objects.errors import ObjectChangedError
from trainsync.storage.objects.inspecting import StoredSave
from trainsync.storage.objects.manifests import SET_ASIDE, Stored, is_mark


@dataclass(frozen=True)
class _Pointer:
    """Content of a pointer: none (``blob`` is None), a ``step``, or a ``problem``."""

    blob: Blob | None
    step: int | None
    problem: str | None

    @property
    def said(self) -> str:
        if self.problem is not None:
            return self.problem
        return "is missing" if self.step is None else f"names step {self.step}"


def plan_saves(
    bucket: ObjectBucket,
    *,
    with_digest: bool,
    threads: int,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> RepairPlan:
    """Set damaged saves aside, and make each pointer name the newest valid one of its kind.

    A save is damaged when an object of it is missing or of another size; with ``with_digest`` also
    when the bytes of one of the newest, up to the newest whole one, differ in two readings. With
    nothing valid left of a kind, all of it stays, and can be looked at. A manifest that cannot be
    understood stays, too: a newer version may have written it.

    Raises:
        StoreError: the store cannot be read.
    """
    actions: list[Action] = []
    refused = []
    saves = inspecting.check_all_sizes(bucket)
    for kind in SaveKind:
        there = [one for one in reversed(saves) if one.save.kind is kind]
        pointer = _read_pointer(bucket, kind)
        newest, judged = _judge(bucket, there, with_digest, threads, on_bytes)
        name = keys.pointer(kind)
        if newest is None:
            if there or pointer.blob is not None:
                refused.append(
                    f"{name}: {pointer.said}, and no valid manifest of a {kind.value} is left to "
                    "move it to; it stays as it is"
                )
            continue
        actions += [
            _aside_action(bucket, one) for one in judged if one.stored and one.save.findings
        ]
        actions += [
            _finish_action(bucket, kind, one.save.step)
            for one in judged
            if one.stored is None and _is_marked(bucket, kind, one.save.step)
        ]
        if pointer.step != newest:
            named = next((one for one in judged if one.save.step == pointer.step), None)
            actions.append(
                Action(
                    ActionKind.MOVE_POINTER,
                    name,
                    f"{pointer.said}; moved to step {newest}, the newest valid {kind.value}",
                    _mover(bucket, kind, pointer, named, newest),
                )
            )
    return RepairPlan(tuple(actions), tuple(refused))


def plan_cleanup(bucket: ObjectBucket, clock: Callable[[], datetime]) -> list[Action]:
    """Remove what copies that were cut off have left, two days after the last of it was put.

    Args:
        clock: the store's (`removal.store_time`).

    Raises:
        StoreError: the store cannot be read.
    """
    actions = [
        Action(
            ActionKind.REMOVE_ORPHANS,
            one.folder,
            f"{counted(len(one.keys), 'object')} that no manifest names, {one.bytes} bytes; "
            "removed",
            _remover(bucket, one.keys),
        )
        for one in removal.orphans(bucket, clock)
    ]
    probes = removal.old_probes(bucket, clock)
    if probes:
        text = f"{counted(len(probes), 'object')} left of trying the store; removed"
        actions.append(
            Action(ActionKind.REMOVE_TEMPORARY, keys.PROBES, text, _remover(bucket, probes))
        )
    return actions


def _judge(
    bucket: ObjectBucket,
    saves: Sequence[StoredSave],
    with_digest: bool,
    threads: int,
    on_bytes: Callable[[int], None],
) -> tuple[int | None, list[StoredSave]]:
    """The newest valid step of ``saves``, which begin with the newest; and all, as judged."""
    newest, judged = None, []
    for one in saves:
        found: StoredSave | None = one
        if newest is None and one.save.valid and with_digest:
            found = _read(bucket, one, threads, on_bytes)
            if found is None:
                continue  # it was pruned meanwhile
        assert found is not None
        judged.append(found)
        if newest is None and found.save.valid:
            newest = found.save.step
    bad = inspecting.damaged_objects(judged)  # also of saves that were not read
    return newest, [inspecting.with_damage(one, bad) for one in judged]


def _read(
    bucket: ObjectBucket, one: StoredSave, threads: int, on_bytes: Callable[[int], None]
) -> StoredSave | None:
    """``one`` with what reading its bytes found twice: once they may have changed on the way."""
    found: list[StoredSave] = []
    for _ in range(2):
        found = inspecting.check_digests(bucket, [one], threads=threads, on_bytes=on_bytes)
        if not found or found[0].save.valid:
            break
    return found[0] if found else None


def _read_pointer(bucket: ObjectBucket, kind: SaveKind) -> _Pointer:
    blob = bucket.find(keys.pointer(kind))
    if blob is None:
        return _Pointer(None, None, None)
    try:
        return _Pointer(blob, commits.step_in(blob, kind), None)
    except DamagedFileError as error:
        return _Pointer(blob, None, error.why)


def _aside_action(bucket: ObjectBucket, one: StoredSave) -> Action:
    stored = one.stored
    assert stored is not None
    kind, step = one.save.kind, one.save.step
    aside = keys.set_aside(stored.keys.values(), kind, step)
    text = f"{one.save.findings[0]}; the manifest is set aside as {aside}"
    return Action(
        ActionKind.SET_ASIDE,
        keys.manifest(kind, step),
        text,
        lambda: set_aside(bucket, stored),
    )


def set_aside(bucket: ObjectBucket, stored: Stored) -> bool:
    """Let a damaged save count no more; whether that was done here. Its manifest goes beside its
    objects."""
    kind, step = stored.manifest.kind, stored.manifest.step
    aside = keys.set_aside(stored.keys.values(), kind, step)
    key = keys.manifest(kind, step)
    there = bucket.find(key)
    if there is None or digest.manifest_digest(there.data) != stored.digest:
        return False
    bucket.create(aside, there.data)
    try:
        bucket.replace(key, SET_ASIDE, there)
    except ObjectChangedError:
        bucket.delete([aside])
        return False
    bucket.delete([key])  # until then no other process can put a manifest
    return True


def finish_set_aside(bucket: ObjectBucket, kind: SaveKind, step: int) -> bool:
    """End a `set_aside` that was cut off; whether there was one."""
    if not _is_marked(bucket, kind, step):
        return False
    bucket.delete([keys.manifest(kind, step)])
    return True


def _is_marked(bucket: ObjectBucket, kind: SaveKind, step: int) -> bool:
    there = bucket.find(keys.manifest(kind, step))
    return there is not None and there.data == SET_ASIDE


def _finish_action(bucket: ObjectBucket, kind: SaveKind, step: int) -> Action:
    key = keys.manifest(kind, step)

    text = "a repair that was cut off had set the save aside; removed"
    return Action(ActionKind.SET_ASIDE, key, text, lambda: finish_set_aside(bucket, kind, step))


def _mover(
    bucket: ObjectBucket, kind: SaveKind, pointer: _Pointer, named: StoredSave | None, step: int
) -> Callable[[], bool]:
    judged = None
    if named is not None and named.stored is not None:
        judged = named.stored.digest
    elif pointer.step is not None:
        judged = _manifest_digest(bucket, kind, pointer.step)

    def move() -> bool:
        if not commits.is_committed(bucket, kind, step):
            return False  # prune was faster
        if pointer.step is not None and pointer.step > step:
            # The save that was judged may have been removed since, and copied again.
            now = _manifest_digest(bucket, kind, pointer.step)
            if now not in (None, judged):
                return False
        return commits.replace_pointer(bucket, kind, step, pointer.blob)

    return move


def _manifest_digest(bucket: ObjectBucket, kind: SaveKind, step: int) -> str | None:
    """None where there is none that counts."""
    there = bucket.find(keys.manifest(kind, step))
    if there is None or is_mark(there.data):
        return None
    return digest.manifest_digest(there.data)


def _remover(bucket: ObjectBucket, names: Sequence[str]) -> Callable[[], bool]:
    def remove() -> bool:
        bucket.delete(names)
        return True

    return remove
