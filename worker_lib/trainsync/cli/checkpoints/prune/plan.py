"""Which steps ``prune`` removes: the monitor's rule, and the steps that stay in spite of it."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from trainsync.api.protocol import SaveKind
from trainsync.cli.checkpoints.reports import leases_in_force
from trainsync.storage import leases
from trainsync.storage.inspect.activity import steps_being_saved
from trainsync.storage.inspect.pointers import newest_valid, targets
from trainsync.storage.inspect.repair import size_of
from trainsync.storage.inspect.saves import InspectedSave, as_trained
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves import claims, scan
from trainsync.storage.saves.resume_target import read_resume_target
from trainsync.storage.saves.retention import choose_removals, remove_unleased


@dataclass(frozen=True)
class PrunedStep:
    """A step that goes, and how much that frees."""

    step: int
    kinds: tuple[SaveKind, ...]
    bytes: int

    def to_json_dict(self) -> dict[str, object]:
        """For ``--json``."""
        return {
            "step": self.step,
            "kinds": [kind.value for kind in self.kinds],
            "bytes": self.bytes,
        }


def choose(run: RunDirectory, saves: list[InspectedSave], keep: int) -> list[int]:
    """Steps to remove, oldest first.

    Besides the last ``keep`` of each kind, in the order of training, stay: what the pointers name,
    the newest save of each kind that is whole, what is leased, what is being saved, and what an
    attempt has resumed from that has committed nothing newer.

    Raises:
        DamagedFileError: what was resumed from cannot be read; or a claim, where there are saves
            of several runs.
        OSError: the volume cannot be read.
        ValueError: ``keep`` is less than 1.
    """
    uid = _run_uid(run, saves)
    newest = {newest_valid(saves, kind) for kind in SaveKind} - {None}
    protected = (
        {step for step in newest if step is not None}
        | set(targets(run).values())
        | {step for _, step in leases_in_force(run)}
        | steps_being_saved(run)
        | _resumed_from(run, saves, uid)
    )
    return choose_removals(
        as_trained(saves, SaveKind.CHECKPOINT, uid),
        as_trained(saves, SaveKind.STATE_DICT, uid),
        keep,
        protected,
        bad_checkpoints={s.step for s in saves if s.kind is SaveKind.CHECKPOINT and not s.valid},
        bad_state_dicts={s.step for s in saves if s.kind is SaveKind.STATE_DICT and not s.valid},
    )


def _run_uid(run: RunDirectory, saves: list[InspectedSave]) -> str:
    """The run that saved last: there may be saves of one that had its name before.

    The staging that is left tells: when a run begins, its monitor removes that of all others.
    Clocks are asked only where there is none, for they may have been set back in between.
    """
    found = [save.committed.manifest for save in saves if save.committed]
    uids = {manifest.run_uid for manifest in found}
    if len(uids) > 1:
        staged = {incarnation for _, incarnation in scan.owners(run)}
        last = claims.runs_of(run, staged) & uids
        if len(last) == 1:
            return last.pop()
    return max(found, key=lambda manifest: manifest.created_at).run_uid if found else ""


def _resumed_from(run: RunDirectory, saves: list[InspectedSave], uid: str) -> set[int]:
    target = read_resume_target(run)
    if target is None:
        return set()
    done = any(
        save.committed.manifest.age(uid) >= target.age(uid)
        for save in saves
        if save.kind is SaveKind.CHECKPOINT and save.step > target.step and save.committed
    )
    return set() if done else {target.step}


def measure(run: RunDirectory, saves: list[InspectedSave], steps: list[int]) -> list[PrunedStep]:
    """The saves that are removed with each of ``steps``."""
    return [
        PrunedStep(
            step,
            tuple(save.kind for save in saves if save.step == step),
            size_of(Path(run.step(step))),
        )
        for step in steps
    ]


def remove(run: RunDirectory, step: int) -> bool:
    """Take the step away at once, under the lock that readers' leases take; whether it is gone.

    Its bytes are freed when the trash is emptied.

    Raises:
        LockTimeoutError: another process holds the lock for too long.
        OSError: nothing changed.
    """
    with leases.lock(run, leases.LOCK_SECONDS, f"trainsync checkpoints prune, {os.getpid()}"):
        if step in targets(run).values():
            return False  # a pointer was moved to it since it was chosen
        book = leases.LeaseBook(run)
        return remove_unleased(run, step, lambda: book.steps(time.monotonic()))
