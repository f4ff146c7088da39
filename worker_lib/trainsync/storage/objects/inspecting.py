"""Saves of a store next to their manifests: by listing at once, by digest when they are read."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from trainsync.api.protocol import SaveKind
from trainsync.storage import block_digests, digest
from trainsync.storage.errors import DamagedFileError, StepGoneError
from trainsync.storage.inspect import pointers
from trainsync.storage.inspect.findings import Code, Finding, Severity
from trainsync.storage.inspect.saves import InspectedSave
from trainsync.storage.layout import parse_step, step_name
from trainsync.storage.objects import commits, keys, parts
from trainsync.storage.objects.bucket import ObjectBucket
from trainsync.storage.objects.errors import ObjectChangedError, ObjectMissingError
from trainsync.storage.objects.live import references
from trainsync.storage.objects.manifests import Stored
from trainsync.storage.parallel import for_each
from trainsync.storage.saves.based import Base
from trainsync.storage.saves.manifest import Committed
from trainsync.storage.saves.receipts import FileEntry

_AT_ONCE: Final = 8
_REMEDIES: Final = ("copy that step again", "copy that step again")


@dataclass(frozen=True)
class StoredSave:
    """A save as `trainsync.storage.inspect` has them; ``stored`` is None when its manifest cannot
    be understood."""

    save: InspectedSave
    stored: Stored | None


def is_store(bucket: ObjectBucket) -> bool:
    """Whether there is anything of a run under the prefix, or nothing at all yet."""
    ours = {
        keys.MANIFESTS,
        keys.OBJECTS,
        keys.PROBES,
        keys.RUN,
        keys.ROLLED_BACK,
        *(keys.pointer(kind) for kind in SaveKind),
    }
    names = {*bucket.folders(""), *(info.key for info in bucket.objects(""))}
    return not names or bool(names & ours)


def check_all_sizes(bucket: ObjectBucket, step: int | None = None) -> list[StoredSave]:
    """Compare every save, or those at ``step``, with a listing of its objects; in order."""
    pairs = commits.committed_pairs(bucket, step)
    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="trainsync-list") as pool:
        found = list(pool.map(lambda pair: _check_sizes(bucket, *pair), pairs))
    return [save for save in found if save is not None]


def _check_sizes(bucket: ObjectBucket, step: int, kind: SaveKind) -> StoredSave | None:
    try:
        stored = commits.read_manifest(bucket, kind, step)
    except StepGoneError:
        return None  # it was pruned meanwhile
    except DamagedFileError as error:
        finding = _damage(Code.MANIFEST, keys.manifest(kind, step), error.why, step, kind)
        return StoredSave(InspectedSave(step, kind, None, (finding,)), None)
    findings = tuple(size_findings(bucket, stored))
    if findings and not _is_there(bucket, stored):
        return None
    return StoredSave(
        InspectedSave(step, kind, Committed(stored.manifest, stored.digest), findings), stored
    )


def size_findings(bucket: ObjectBucket, stored: Stored) -> list[Finding]:
    """Objects of a save that are missing or of another size: a listing for each step that has some.

    An object that they lack is asked for itself, as listings may be late, until one is not there.
    """
    steps = {keys.step_of(key) for key in stored.objects}
    listed = (info for step in steps for info in bucket.below(keys.step_objects(step)))
    sizes = {info.key: info.bytes for info in listed}
    found: list[Finding] = []
    for entry in stored.manifest.files:
        own, base = stored.keys[entry.path], stored.bases.get(entry.path)
        for key, expected in parts.sizes(own, entry.bytes, base).items():
            there = sizes.get(key)
            if there is None and not found:
                there = bucket.size(key)
            # The object is named where it is not the file.
            what = f"{key} " if base is not None else ""
            if there is None:
                text = f"{what}is missing, expected {expected} bytes"
                found.append(_of_file(stored, entry, Code.MISSING, text, key))
            elif there != expected:
                text = f"{what}has {there} bytes, expected {expected}"
                found.append(_of_file(stored, entry, Code.SIZE, text, key))
    return found


def bytes_to_read(saves: Iterable[StoredSave]) -> int:
    """The bytes that `check_digests` will read."""
    return sum(first.bytes for (_, first), *_ in _readings(saves))


def check_digests(
    bucket: ObjectBucket,
    saves: Sequence[StoredSave],
    *,
    threads: int,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> list[StoredSave]:
    """Read every object whose size is right, and add what differs to the saves' findings.

    A file that several saves have of the same objects is read once. A save that is pruned meanwhile
    is left out.
    """
    problems: dict[tuple[SaveKind, int], list[Finding]] = {}

    def read(files: _Files, go_on: Callable[[], None]) -> None:
        def tell(count: int) -> None:
            go_on()
            on_bytes(count)

        found = _read(bucket, *files[0], tell)
        if found is not None:
            for stored, entry in files:
                code, text, damaged = found
                finding = _of_file(stored, entry, code, text, *damaged)
                key = (stored.manifest.kind, stored.manifest.step)
                problems.setdefault(key, []).append(finding)

    for_each(sorted(_readings(saves), key=lambda files: -files[0][1].bytes), read, threads)
    checked = []
    for found in saves:
        more = problems.get((found.save.kind, found.save.step), [])
        if more and found.stored is not None and not _is_there(bucket, found.stored):
            continue
        ordered = sorted(more, key=lambda finding: finding.path)
        save = replace(found.save, findings=(*found.save.findings, *ordered))
        checked.append(StoredSave(save, found.stored))
    return checked


def damaged_objects(saves: Iterable[StoredSave]) -> dict[str, Finding]:
    """The keys of objects that findings of ``saves`` speak of."""
    return {
        key: finding for one in saves for finding in one.save.findings for key in finding.objects
    }


def with_damage(one: StoredSave, damaged: Mapping[str, Finding]) -> StoredSave:
    """``one`` with a finding for each object of it that is damaged by what another save found."""
    if one.stored is None or not one.save.valid:
        return one
    more = []
    for entry in one.stored.manifest.files:
        own, base = one.stored.keys[entry.path], one.stored.bases.get(entry.path)
        for key in parts.sizes(own, entry.bytes, base):
            if (finding := damaged.get(key)) is not None:
                has = "is the same" if base is None else "has blocks of the same"
                text = f"{has} object as {finding.path}, which {finding.message}"
                more.append(_of_file(one.stored, entry, finding.code, text, key))
    return StoredSave(replace(one.save, findings=(*one.save.findings, *more)), one.stored)


def read_digest(
    bucket: ObjectBucket,
    key: str,
    size: int,
    base: Base | None = None,
    tell: Callable[[int], None] = lambda _: None,
) -> str:
    """Digest of a file's bytes.

    Args:
        key: of its object; ``base`` has the rest, if that has a part.
        tell: called with the size of each block that was read.

    Raises:
        ObjectMissingError, ObjectChangedError: an object went away, or has another size.
    """
    hasher = digest.new_hasher()
    for block in parts.read_blocks(bucket, key, size, base):
        hasher.update(block)
        tell(len(block))
    return digest.format_digest(hasher)


def check_pointers(bucket: ObjectBucket, saves: Sequence[InspectedSave]) -> list[Finding]:
    """Pointers that name nothing, or nothing whole, or less than the newest."""
    found = (
        pointers.judge(
            kind,
            keys.pointer(kind),
            partial(commits.read_pointer, bucket, kind),
            saves,
            _REMEDIES,
        )
        for kind in SaveKind
    )
    return [finding for finding in found if finding is not None]


def targets(bucket: ObjectBucket) -> dict[SaveKind, int]:
    """The step that each pointer names; one that is absent or not understood names nothing."""
    found = {}
    for kind in SaveKind:
        try:
            step = commits.read_pointer(bucket, kind)
        except DamagedFileError:
            continue  # `check_pointers` says so
        if step is not None:
            found[kind] = step
    return found


def unlisted(bucket: ObjectBucket, saves: Sequence[StoredSave]) -> list[tuple[int, str]]:
    """(step, folder) of each writer's folder in which no manifest of ``saves`` names an object:
    a copy that is at work, or that was killed. None where a manifest that a roll-back has set aside
    cannot be understood: it may name any."""
    try:
        aside = references.rolled_back(bucket)
    except DamagedFileError:
        return []
    named = {keys.folder_of(key) for key in aside} | {
        keys.folder_of(key)
        for found in saves
        if found.stored is not None
        for key in found.stored.objects
    }
    lonely = []
    for folder in bucket.folders(keys.OBJECTS):
        step = parse_step(folder.rpartition("/")[2])
        if step is not None:
            lonely += [(step, there) for there in bucket.folders(folder) if there not in named]
    return sorted(lonely)


def unlisted_findings(bucket: ObjectBucket, saves: Sequence[StoredSave]) -> list[Finding]:
    """`unlisted`, as findings."""
    text = (
        "objects that no manifest names: a copy is at work or was cut off, or the save was set "
        "aside (prune removes them)"
    )
    return [
        Finding(Severity.LEFTOVER, Code.UNLISTED, folder, text, step)
        for step, folder in unlisted(bucket, saves)
    ]


_Files = list[tuple[Stored, FileEntry]]
"""Files of several saves that are one object, and should have the same bytes."""


def _readings(saves: Iterable[StoredSave]) -> list[_Files]:
    found: dict[tuple[str, Base | None, FileEntry], _Files] = {}
    for one in saves:
        bad = {finding.path for finding in one.save.findings}
        if one.stored is not None:
            for entry in one.stored.manifest.files:
                if _name(one.stored, entry) not in bad:
                    own, base = one.stored.keys[entry.path], one.stored.bases.get(entry.path)
                    same = (own, base, entry)
                    found.setdefault(same, []).append((one.stored, entry))
    return list(found.values())


def _read(
    bucket: ObjectBucket, stored: Stored, entry: FileEntry, tell: Callable[[int], None]
) -> tuple[Code, str, tuple[str, ...]] | None:
    own, base = stored.keys[entry.path], stored.bases.get(entry.path)
    try:
        found = read_digest(bucket, own, entry.bytes, base, tell)
        if found == entry.digest:
            return None
        damaged = (own,) if base is None else _which(bucket, stored, entry, base)
    except ObjectMissingError:
        return Code.MISSING, "went away while it was read", (own,)
    except ObjectChangedError as error:
        return Code.SIZE, f"is another one by now: {error}", (own,)
    return Code.DIGEST, f"has digest {found}, expected {entry.digest}", damaged


def _which(bucket: ObjectBucket, stored: Stored, entry: FileEntry, base: Base) -> tuple[str, ...]:
    """The objects of which a block differs from its digest beside the file; the file's own where
    that cannot be told: older steps count on without it."""
    own, path = stored.keys[entry.path], block_digests.beside(entry.path)
    listed = next((one for one in stored.manifest.files if one.path == path), None)
    blocks = None
    if listed is not None:
        with suppress(ObjectMissingError, ObjectChangedError):  # a finding says so
            data = b"".join(bucket.blocks(stored.keys[path], listed.bytes))
            blocks = block_digests.decode(data, entry.bytes)
    if blocks is None:
        return (own,)
    hasher = block_digests.BlockHasher(blocks.block)
    for block in parts.read_blocks(bucket, own, entry.bytes, base):
        hasher.update(memoryview(block))
    hasher.finish()
    place, size = base.blocks(entry.bytes), blocks.block
    differ = {place.is_own(number * size // place.block) for number in hasher.differing(blocks)}
    return tuple(key for key, mine in ((own, True), (base.key, False)) if mine in differ) or (own,)


def _is_there(bucket: ObjectBucket, stored: Stored) -> bool:
    found = stored.manifest
    return commits.is_committed(bucket, found.kind, found.step)


def _of_file(stored: Stored, entry: FileEntry, code: Code, message: str, *objects: str) -> Finding:
    found = stored.manifest
    return _damage(code, _name(stored, entry), message, found.step, found.kind, objects)


def _name(stored: Stored, entry: FileEntry) -> str:
    return f"{step_name(stored.manifest.step)}/{entry.path}"


def _damage(
    code: Code,
    path: str,
    message: str,
    step: int,
    kind: SaveKind,
    objects: tuple[str, ...] = (),
) -> Finding:
    return Finding(Severity.DAMAGE, code, path, message, step, kind, objects)
