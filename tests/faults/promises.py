"""Promises that must hold on the disk at any time, after any fault; checked on the files alone."""

import shutil
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch
from trainsync.api.protocol import SaveKind
from trainsync.api.status import StopSave, StopSaveState
from trainsync.checkpoint.shard_names import parse_shard_file_name
from trainsync.monitor.core.core import CoreSettings, MonitorCore
from trainsync.monitor.core.views import CoreView
from trainsync.monitor.ledger.saves import SaveOwner
from trainsync.storage.errors import DamagedFileError, FileCheckError, StorageError
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves import manifest, pointers, promote, receipts, scan
from trainsync.storage.saves.receipts import Participant, Receipt

from tests.faults.plan import Plan, Shape, Step, same
from tests.faults.processes import BrokenError


class Watch:
    """Checks the pointers during a whole trial: they name commits and never go back."""

    def __init__(self, run: RunDirectory) -> None:
        self._run = run
        self.newest: dict[SaveKind, int] = {}

    def look(self) -> None:
        """Check the pointers once; cheap enough for every few milliseconds."""
        for kind in SaveKind:
            before = self.newest.get(kind)
            step = self._pointer(kind)
            if step is None:
                if before is not None:
                    raise BrokenError(f"the pointer of {kind} is gone; it named {before}")
                continue
            if before is not None and step < before:
                raise BrokenError(f"the pointer of {kind} went back from {before} to {step}")
            self.newest[kind] = step
            # Read the pointer again if the manifest is missing: retention may have followed a newer
            # commit.
            if not self._run.manifest(kind, step).exists() and self._pointer(kind) == step:
                raise BrokenError(f"the pointer of {kind} names {step}, which has no manifest")

    def _pointer(self, kind: SaveKind) -> int | None:
        try:
            return pointers.read_pointer(self._run, kind)
        except DamagedFileError as error:
            raise BrokenError(f"the pointer of {kind} is damaged: {error}") from error


def check_commits(
    run: RunDirectory, plan: Plan, owners: Iterable[SaveOwner], steps: dict[tuple[int, int], Step]
) -> dict[SaveKind, list[int]]:
    """Check that every manifest is complete and all its files are of one save, bit for bit; returns
    the committed steps by kind.

    Args:
        owners: attempts that may have committed.
        steps: the step that (attempt, number) saved.
    """
    known = set(owners)
    found: dict[SaveKind, list[int]] = {}
    for kind in SaveKind:
        found[kind] = []
        for number in manifest.committed_steps(run, kind):
            try:
                _check_commit(run, plan, known, steps, kind, number)
            except (BrokenError, OSError):
                if run.manifest(kind, number).exists():
                    raise
                continue  # a live monitor has just removed the step
            found[kind].append(number)
    return found


def _check_commit(
    run: RunDirectory,
    plan: Plan,
    owners: set[SaveOwner],
    steps: dict[tuple[int, int], Step],
    kind: SaveKind,
    number: int,
) -> None:
    try:
        record = manifest.read_manifest(run, kind, number).manifest
        manifest.check_manifest(run, record, with_digest=True)
    except (DamagedFileError, FileCheckError, FileNotFoundError) as error:
        raise BrokenError(f"committed {kind} {number} is torn: {error}") from error
    if SaveOwner(record.attempt, record.incarnation) not in owners:
        raise BrokenError(f"{kind} {number} was committed by a stranger, {record}")
    listed = {entry.path for entry in record.files}
    if listed != plan.files(kind, steps[record.attempt, number]):
        raise BrokenError(f"{kind} {number} lists {sorted(listed)}")
    for path in listed:
        _check_content(run, plan, record.attempt, number, path)


def check_receipts(run: RunDirectory, owner: SaveOwner) -> None:
    """Check that each receipt's files exist, in staging or in the step's directory, unless the
    machine went down.

    The staging of an ended attempt is discarded while its writers may still work: a receipt may
    then outlive its file, and no monitor reads that receipt.
    """
    if any(int(path.name.rsplit("-", 2)[1]) > owner.attempt for path in _claims(run)):
        return
    for found in _saves(run, owner):
        if found.outcome is not None or found.failures:
            continue  # the monitor is removing the listed files
        if _committed_by(run, found.kind, found.step, owner):
            continue  # the manifest replaces the receipts
        save = run.save(owner.attempt, owner.incarnation, found.kind, found.step)
        for receipt in found.receipts:
            for entry in receipt.files:
                try:
                    base = promote.locate(run, save, found.step, entry, receipt.writer)
                    manifest.check_file(base, entry, with_digest=True)
                except (OSError, StorageError) as error:
                    if not save.receipt(receipt.component, receipt.rank).exists():
                        continue  # a monitor has discarded both since the listing
                    raise BrokenError(
                        f"{found.kind} {found.step}, {receipt.participant}: the receipt is "
                        f"there, its file is not: {error}"
                    ) from error


def _claims(run: RunDirectory) -> list[Path]:
    return sorted(run.claims.glob("[!.]*-*-*.json"))


def will_commit(
    run: RunDirectory, plan: Plan, owner: SaveOwner, step: Step
) -> dict[SaveKind, bool]:
    """For each save of ``step``: whether the next monitor must commit the save."""
    on_disk = {found.kind: found for found in _saves(run, owner) if found.step == step.number}
    result: dict[SaveKind, bool] = {}
    for kind in step.shape.kinds:
        found = on_disk.get(kind)
        if _committed_by(run, kind, step.number, owner):
            result[kind] = True
        elif found is None or found.outcome is not None or found.failures or found.damaged:
            result[kind] = False
        else:
            wanted = {Participant(*who) for who in plan.participants(step, kind)}
            complete = wanted <= {_whose(receipt) for receipt in found.receipts}
            reused = result.get(SaveKind.STATE_DICT, False) or step.shape is not Shape.REUSE
            needs = kind is SaveKind.CHECKPOINT
            result[kind] = complete and found.registration is not None and (reused or not needs)
    return result


def check_answer(run: RunDirectory, answer: StopSave) -> None:
    """Check that what the status tells of a save before the pods go is true on the disk."""
    kind = SaveKind.CHECKPOINT
    newest = max(manifest.committed_steps(run, kind), default=-1)
    # Retention may take a step that is not the newest any more.
    if answer.state is StopSaveState.COMMITTED and newest < answer.step:
        raise BrokenError(f"status tells that {kind} {answer.step} is committed; it is not")
    if answer.state is StopSaveState.FAILED and newest == answer.step:
        raise BrokenError(f"status tells that {kind} {answer.step} failed; it is committed")


def check_kept(told: int | None, trained: int, resumed: int, committed: int) -> None:
    """Check where the attempt after a preemption goes on.

    Args:
        told: the step that status told to be committed before the pods went.
        trained: the last step that the preempted attempt trained.
        resumed: the step that the next attempt resumes at; 0 without a checkpoint.
        committed: the newest step that the preempted attempt left committed or complete.
    """
    if told is not None and told != trained:
        raise BrokenError(f"step {told} is told to be saved, and step {trained} was trained: lost")
    if resumed != committed:
        raise BrokenError(f"the next attempt resumes at {resumed}, committed is {committed}")
    if told is not None and resumed != trained:
        raise BrokenError(f"the next attempt resumes at {resumed}, {trained} was trained: lost")
    if resumed > trained:
        raise BrokenError(f"the next attempt resumes at {resumed}, only {trained} was trained")


def check_freed(held: float, notice: float, spare: float) -> None:
    """Check that a pod's preStop command held the pod no longer than it was allowed to."""
    if held > notice + spare:
        raise BrokenError(f"the pod was held for {held:.1f} s, {notice:.1f} s were allowed")


def check_same_ledger(run: RunDirectory, plan: Plan, uid: str, scratch: Path) -> None:
    """Check that two monitors started on copies of this disk reach equal ledgers and files."""
    views, trees = [], []
    now = datetime.now(UTC)
    for name in ("first", "second"):
        copy = scratch / name
        shutil.copytree(run.root, copy, symlinks=True)
        view, tree = _rebuild(copy, plan, uid, now)
        views.append(replace(view, volume=None))  # other processes write to the disk meanwhile
        trees.append(tree)
        shutil.rmtree(copy)
    if views[0] != views[1]:
        raise BrokenError(f"the same disk gives two ledgers: {views[0]} and {views[1]}")
    if trees[0] != trees[1]:
        differs = sorted(set(trees[0]) ^ set(trees[1]))
        raise BrokenError(f"the same disk is tidied in two ways: {differs}")


def _rebuild(root: Path, plan: Plan, uid: str, now: datetime) -> tuple[CoreView, list[str]]:
    core = MonitorCore(
        RunDirectory(root),
        CoreSettings(run_uid=uid, max_to_keep=plan.keep, verify=plan.verify),
        clock=lambda: now,
    )
    core.tick()
    files = [str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()]
    return core.view(), sorted(name for name in files if not name.endswith(".lock"))


def _check_content(run: RunDirectory, plan: Plan, attempt: int, number: int, path: str) -> None:
    parsed = parse_shard_file_name(path.rpartition("/")[2])
    if parsed is None:
        raise BrokenError(f"step {number} lists {path}, which nobody writes")
    name, rank = parsed[0], parsed[1]
    loaded = torch.load(run.step(number) / path, weights_only=True)
    if not same(loaded, plan.state(attempt, number, name, rank)):
        raise BrokenError(
            f"{path} of step {number} does not hold what attempt {attempt} had when it saved"
        )


def _committed_by(run: RunDirectory, kind: SaveKind, number: int, owner: SaveOwner) -> bool:
    try:
        record = manifest.read_manifest(run, kind, number).manifest
    except FileNotFoundError:
        return False
    return SaveOwner(record.attempt, record.incarnation) == owner


def _saves(run: RunDirectory, owner: SaveOwner) -> list[scan.SaveOnDisk]:
    return scan.Scanner(run).saves(owner.attempt, owner.incarnation)


def _whose(receipt: Receipt) -> receipts.Participant:
    return receipt.participant
