"""Chooses what an attempt resumes from: the newest checkpoint of the store that is whole.

One that is not is set aside, so that its step can be saved again. A checkpoint that a rank could
not load is read to its last bit first, and with ``checkpoint.verify: digest`` each one is.
"""

import json
import logging
from typing import Final

from trainsync.api.protocol import DamageReport, SaveKind
from trainsync.monitor.commit.observer import Observer
from trainsync.monitor.errors import NoValidCheckpointError
from trainsync.monitor.ledger.ledger import Ledger
from trainsync.storage.errors import DamagedFileError, StepGoneError
from trainsync.storage.inspect.saves import InspectedSave
from trainsync.storage.objects import commits, inspecting, keys, mending
from trainsync.storage.objects.bucket import Bucket
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


def note_doubt(bucket: Bucket, report: DamageReport) -> None:
    """Have the checkpoint read in full before another attempt resumes from it."""
    record = {"step": report.step, "manifestDigest": report.manifest_digest}
    data = json.dumps({**record, "reason": report.error[:_LONGEST], "version": 1}).encode()
    try:
        bucket.create(names.doubt(report.step), data)
    except ObjectExistsError:
        return  # it is doubted already


def choose(bucket: Bucket, ledger: Ledger, observer: Observer, *, with_digest: bool) -> Origin:
    """The newest whole checkpoint; newer ones are set aside, and the pointer is repaired.

    With nothing whole left all of it stays, to be looked at.

    Raises:
        NoValidCheckpointError: something was committed and nothing whole is left.
        StoreError: the store cannot be read.
    """
    problems: list[str] = []
    damaged: list[tuple[Stored, str]] = []
    doubted = {info.key for info in bucket.objects(names.DOUBTS)}
    for step in reversed(commits.committed_steps(bucket, _KIND)):
        doubt = names.doubt(step)
        try:
            stored = commits.read_manifest(bucket, _KIND, step)
        except StepGoneError:
            continue
        except DamagedFileError as error:
            if not mending.finish_set_aside(bucket, _KIND, step):
                problems.append(str(error))  # it stays: a newer release may have written it
            continue
        problem = _problem(bucket, stored, read=with_digest or doubt in doubted)
        if problem is not None:
            problems.append(problem)
            damaged.append((stored, problem))
            continue
        for bad, why in damaged:
            _set_aside(bucket, ledger, observer, bad, why)
        bucket.delete(
            sorted(doubted & {doubt, *(names.doubt(s.manifest.step) for s, _ in damaged)})
        )
        _point(bucket, step)
        return Origin(step=step, digest=stored.digest)
    pointer = commits.read_pointer(bucket, _KIND)
    if problems or pointer is not None:
        raise NoValidCheckpointError(
            f"{bucket.name}: the pointer names step {pointer}, but no valid manifest is left"
            + "".join(f"; {problem}" for problem in problems)
        )
    return Origin()


def _set_aside(
    bucket: Bucket, ledger: Ledger, observer: Observer, stored: Stored, why: str
) -> None:
    step = stored.manifest.step
    _LOG.error("checkpoint %d is set aside: %s", step, why)
    if mending.set_aside(bucket, stored):
        observer.set_aside(step)
    ledger.uncommitted(_KIND, step)
    observer.damaged(_KIND, why)


def _problem(bucket: Bucket, stored: Stored, *, read: bool) -> str | None:
    findings = inspecting.size_findings(bucket, stored)
    if not findings and read:
        committed = Committed(stored.manifest, stored.digest)
        save = StoredSave(InspectedSave(stored.manifest.step, _KIND, committed, ()), stored)
        for _ in range(2):  # once the bytes may have changed on the way
            checked = inspecting.check_digests(bucket, [save], threads=_THREADS)
            findings = list(checked[0].save.findings) if checked else []
            if not findings:
                break
    return str(findings[0]) if findings else None


def _point(bucket: Bucket, step: int) -> None:
    there = bucket.find(keys.pointer(_KIND))
    try:
        named = None if there is None else commits.step_in(there, _KIND)
    except DamagedFileError as error:
        _LOG.error("%s: it is repaired", error)
        named = None
    if named != step:
        commits.replace_pointer(bucket, _KIND, step, there)
