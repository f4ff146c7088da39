"""Chooses what an attempt resumes from: the newest checkpoint of the store that is whole.

One that is not is set aside, so that its step can be saved again, and with it each other one, and
each state dict, that names an object which was found damaged. A checkpoint that a rank could not
load is read to its last bit first, and with ``checkpoint.verify: digest`` each one is.
"""

import json
import logging
from dataclasses import dataclass, field, replace
from typing import Final

from trainsync.api.protocol import DamageReport, SaveKind
from trainsync.monitor.commit.newest import WEIGHTS
from trainsync.monitor.commit.observer import Observer
from trainsync.monitor.errors import NoValidCheckpointError
from trainsync.monitor.ledger.ledger import Ledger
from trainsync.storage.errors import DamagedFileError, StepGoneError
from trainsync.storage.inspect.findings import Finding
from trainsync.storage.inspect.saves import InspectedSave
from trainsync.storage.objects import commits, inspecting, keys, repair
from trainsync.storage.objects.bucket import ObjectBucket
from trainsync.storage.objects.errors import ObjectExistsError
from trainsync.storage.objects.inspecting import StoredSave
from trainsync.storage.objects.live import names
from trainsync.storage.objects.live.term import Origin
from trainsync.storage.objects.manifests import Stored
from trainsync.storage.saves.manifest import Committed

_LOG = logging.getLogger(__name__)
_KIND: Final = SaveKind.CHECKPOINT
_THREADS: Final = 4
_LONGEST: Final = 4096


def request_quarantine(bucket: ObjectBucket, report: DamageReport) -> None:
    """Have the checkpoint read in full before another attempt resumes from it."""
    record = {"step": report.step, "manifestDigest": report.manifest_digest}
    data = json.dumps({**record, "reason": report.error[:_LONGEST], "version": 1}).encode()
    try:
        bucket.create(names.doubt(report.step), data)
    except ObjectExistsError:
        return  # requested already


@dataclass
class Looked:
    """Findings of a look at the checkpoints, the newest first: nothing of them is changed yet.

    ``whole`` is the newest that is whole; ``damaged`` are those before it, and older ones that have
    damaged objects in common with them, with what is wrong; ``problems`` are all sentences.
    ``state_dicts`` are those that have damaged objects in common with them. ``doubted`` are keys of
    reports of damage.
    """

    whole: Stored | None = None
    damaged: list[tuple[Stored, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    state_dicts: list[tuple[Stored, str]] = field(default_factory=list)
    doubted: set[str] = field(default_factory=set)
    pointer: int | None = None


def look(bucket: ObjectBucket, *, with_digest: bool) -> Looked:
    """Look for the newest whole checkpoint. In any thread: it may read everything.

    Raises:
        StoreError: the store cannot be read.
    """
    found = Looked(doubted={info.key for info in bucket.objects(names.DOUBTS)})
    bad: dict[str, Finding] = {}
    for step in reversed(commits.known_steps(bucket, _KIND)):
        if found.whole is not None and not bad:
            break
        try:
            stored = commits.read_manifest(bucket, _KIND, step)
        except StepGoneError:
            continue
        except DamagedFileError as error:
            if found.whole is None and not repair.finish_set_aside(bucket, _KIND, step):
                found.problems.append(str(error))  # it stays: a newer release may have written it
            continue
        judged = inspecting.with_damage(_unjudged(stored), bad)
        if found.whole is None and judged.save.valid:
            read = with_digest or names.doubt(step) in found.doubted
            judged = _judge(bucket, stored, read=read)
        if not judged.save.valid:
            bad |= inspecting.damaged_objects([judged])
            problem = str(judged.save.findings[0])
            found.problems.append(problem)
            found.damaged.append((stored, problem))
        elif found.whole is None:
            found.whole = stored
    if found.whole is None:
        found.pointer = commits.read_pointer(bucket, _KIND)
    if bad:
        found.state_dicts = _with_damage(bucket, bad)
    return found


def _with_damage(bucket: ObjectBucket, bad: dict[str, Finding]) -> list[tuple[Stored, str]]:
    """State dicts that name one of these objects, with what is wrong."""
    found = []
    for step in commits.committed_steps(bucket, SaveKind.STATE_DICT):
        try:
            stored = commits.read_manifest(bucket, SaveKind.STATE_DICT, step)
        except (StepGoneError, DamagedFileError):
            continue
        judged = inspecting.with_damage(_unjudged(stored), bad)
        if not judged.save.valid:
            found.append((stored, str(judged.save.findings[0])))
    return found


def settle(bucket: ObjectBucket, ledger: Ledger, observer: Observer, found: Looked) -> Origin:
    """Decide by what was found; damaged ones are set aside, and the pointer is repaired.

    With nothing whole left all of it stays, to be looked at.

    Raises:
        NoValidCheckpointError: something was committed and nothing whole is left.
        StoreError: the store cannot be written.
    """
    if found.whole is None:
        if found.problems or found.pointer is not None:
            raise NoValidCheckpointError(
                f"{bucket.name}: the pointer names step {found.pointer}, but no valid manifest is "
                "left" + "".join(f"; {problem}" for problem in found.problems)
            )
        return Origin()
    # State dicts first, as they are found by the checkpoints that share their damage.
    for bad, why in (*found.state_dicts, *found.damaged):
        _set_aside(bucket, ledger, observer, bad, why)
    if found.state_dicts:
        _point_state_dicts(bucket)
    step = found.whole.manifest.step
    settled = {names.doubt(step), *(names.doubt(s.manifest.step) for s, _ in found.damaged)}
    bucket.delete(sorted(found.doubted & settled))
    _point(bucket, step)
    return Origin(step=step, digest=found.whole.digest)


def same_weights(bucket: ObjectBucket, step: int) -> bool:
    """Whether the checkpoint of ``step`` has every weight file of its state dict, byte for byte.

    Raises:
        StepGoneError, DamagedFileError: one of the two cannot be read.
    """
    state_dict = commits.read_manifest(bucket, SaveKind.STATE_DICT, step).manifest
    checkpoint = commits.read_manifest(bucket, SaveKind.CHECKPOINT, step).manifest
    weights = {entry for entry in state_dict.files if entry.path.endswith(WEIGHTS)}
    return bool(weights) and weights.issubset(checkpoint.files)


def _set_aside(
    bucket: ObjectBucket, ledger: Ledger, observer: Observer, stored: Stored, why: str
) -> None:
    kind, step = stored.manifest.kind, stored.manifest.step
    _LOG.error("%s %d is set aside: %s", kind, step, why)
    if repair.set_aside(bucket, stored) and kind is _KIND:
        observer.set_aside(step)
    ledger.uncommitted(kind, step)
    observer.damaged(kind, why)


def _unjudged(stored: Stored) -> StoredSave:
    manifest = stored.manifest
    committed = Committed(manifest, stored.digest)
    return StoredSave(InspectedSave(manifest.step, manifest.kind, committed, ()), stored)


def _judge(bucket: ObjectBucket, stored: Stored, *, read: bool) -> StoredSave:
    judged = _unjudged(stored)
    if sizes := inspecting.size_findings(bucket, stored):
        return StoredSave(replace(judged.save, findings=tuple(sizes)), stored)
    if not read:
        return judged
    found = judged
    for _ in range(2):  # once the bytes may have changed on the way
        checked = inspecting.check_digests(bucket, [judged], threads=_THREADS)
        found = checked[0] if checked else judged
        if found.save.valid:
            break
    return found


def _point_state_dicts(bucket: ObjectBucket) -> None:
    """Name the newest state dict that is left; with none left the pointer goes."""
    kind = SaveKind.STATE_DICT
    steps = commits.committed_steps(bucket, kind)
    if steps:
        _point(bucket, steps[-1], kind)
    else:
        bucket.delete([keys.pointer(kind)])


def _point(bucket: ObjectBucket, step: int, kind: SaveKind = _KIND) -> None:
    there = bucket.find(keys.pointer(kind))
    try:
        named = None if there is None else commits.step_in(there, kind)
    except DamagedFileError as error:
        _LOG.error("%s: it is repaired", error)
        named = None
    if named != step:
        commits.replace_pointer(bucket, kind, step, there)
