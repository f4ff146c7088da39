"""Finds leftovers beside committed files: in the steps' directories, in the root, in staging."""

from collections.abc import Sequence
from pathlib import Path

from pydantic import TypeAdapter

from trainsync.api.protocol import SaveKind
from trainsync.storage.atomic import is_temporary, is_there
from trainsync.storage.errors import DamagedFileError
from trainsync.storage.inspect.findings import (
    Code,
    Finding,
    damage,
    entries,
    leftover,
    refuse_link,
    temporary,
    walk_files,
)
from trainsync.storage.inspect.saves import InspectedSave
from trainsync.storage.layout import RunDirectory, parse_owner, parse_step
from trainsync.storage.saves import manifest, scan
from trainsync.storage.saves.claims import Claim
from trainsync.storage.saves.receipts import SaveOutcome
from trainsync.storage.saves.scan import SaveOnDisk

_CLAIM = TypeAdapter(Claim)


def in_steps(
    run: RunDirectory, saves: Sequence[InspectedSave], step: int | None = None
) -> list[Finding]:
    """Files that no manifest lists in the directories of the steps (of ``step`` alone)."""
    found = []
    by_step: dict[int, list[InspectedSave]] = {}
    for save in saves:
        by_step.setdefault(save.step, []).append(save)
    for entry in entries(run.root):
        number = parse_step(entry.name)
        if number is None or (step is not None and number != step):
            continue
        if not entry.is_dir(follow_symlinks=False):
            found.append(
                damage(run, Path(entry.path), Code.NOT_A_DIRECTORY, "is not a directory", number)
            )
            continue
        found += _in_step(run, number, by_step.get(number, []))
    return found


def _in_step(run: RunDirectory, step: int, saves: Sequence[InspectedSave]) -> list[Finding]:
    base = run.step(step)
    aside = [path for kind in SaveKind if is_there(path := run.set_aside(kind, step))]
    found = [
        leftover(run, path, Code.SET_ASIDE, "of a damaged save that counts no more", step)
        for path in aside
    ]
    if not saves and aside:
        return found
    if not saves:
        return [
            leftover(
                run,
                base,
                Code.HALF_PROMOTED,
                "has no manifest: files of a save that was never committed",
                step,
            )
        ]
    listed = {entry.path for save in saves for entry in save.files}
    listed |= {run.manifest(kind, step).name for kind in SaveKind}
    listed |= {path.name for path in aside}
    # A manifest that cannot be understood may list any of them.
    all_known = all(save.committed is not None for save in saves)
    for entry in walk_files(base):
        path = Path(entry.path)
        if path.relative_to(base).as_posix() in listed:
            continue
        if is_temporary(entry.name):
            found.append(temporary(run, path, step))
        elif all_known:
            what = "a symbolic link (not followed)" if entry.is_symlink() else "a file"
            found.append(leftover(run, path, Code.UNLISTED, f"{what} that no manifest lists", step))
    return found


def in_root(run: RunDirectory) -> list[Finding]:
    """Temporary files directly in the run's directory. (What else is there is not ours.)"""
    return [
        temporary(run, Path(entry.path)) for entry in entries(run.root) if is_temporary(entry.name)
    ]


def in_staging(run: RunDirectory) -> list[Finding]:
    """Saves that are unfinished, staging that is superseded, temporaries, and commits undone.

    Raises:
        OSError: the volume cannot be read.
    """
    if (finding := refuse_link(run, run.staging)) is not None:
        return [finding]
    found, linked = [], set()
    for entry in walk_files(run.staging):
        path = Path(entry.path)
        if entry.is_symlink():
            linked.add(path.relative_to(run.staging).parts[0])
            text = "a symbolic link (not followed)"
            found.append(leftover(run, path, Code.STAGING, text))
        elif is_temporary(entry.name):
            found.append(temporary(run, path))
    owners = scan.owners(run)
    newest = max((attempt for attempt, _ in owners), default=None)
    for entry in entries(run.staging):
        path, owner = Path(entry.path), parse_owner(entry.name)
        if entry.name in linked or is_temporary(entry.name):
            continue
        if owner is None:
            found.append(leftover(run, path, Code.STAGING, "is the staging directory of no save"))
        elif owner[0] != newest:
            text = f"staging of attempt {owner[0]}, which attempt {newest} has superseded"
            found.append(leftover(run, path, Code.STAGING, text))
        else:
            for save in scan.Scanner(run).saves(*owner):
                found += _staged(run, owner, save)
    return found


def _staged(run: RunDirectory, owner: tuple[int, str], save: SaveOnDisk) -> list[Finding]:
    directory = run.save(*owner, save.kind, save.step)
    found = [
        leftover(run, directory.path, Code.STAGING, f"holds a damaged record: {text}", save.step)
        for text in save.damaged
    ]
    if save.outcome is None:
        known = len(save.receipts)
        of = f" of {len(save.registration.participants)}" if save.registration else ""
        text = f"an unfinished save ({known}{of} receipts): in flight, or cut off by a kill"
        found.append(leftover(run, directory.path, Code.STAGING, text, save.step))
        return found
    if is_there(directory.files) or is_there(directory.receipts):
        ended = "aborted" if save.outcome.error is not None else "committed"
        text = f"staged files of a save that was {ended}"
        found.append(leftover(run, directory.path, Code.STAGING, text, save.step))
    if save.outcome.manifest_digest is not None:
        found += _commit_undone(run, save, save.outcome)
    return found


def _commit_undone(run: RunDirectory, save: SaveOnDisk, outcome: SaveOutcome) -> list[Finding]:
    """A commit is on record: the manifest must be as it was, unless retention took the step."""
    path = run.manifest(save.kind, save.step)
    if not run.step(save.step).is_dir():
        return []
    try:
        digest = manifest.read_manifest(run, save.kind, save.step).digest
    except FileNotFoundError:
        if is_there(run.set_aside(save.kind, save.step)):
            return []  # found in the step
        text = "is missing, though the save was committed"
        return [damage(run, path, Code.MANIFEST_MISSING, text, save.step, save.kind)]
    except DamagedFileError:
        return []  # found with the save
    if digest == outcome.manifest_digest:
        return []
    text = f"has digest {digest}, but {outcome.manifest_digest} was committed"
    return [damage(run, path, Code.MANIFEST_CHANGED, text, save.step, save.kind)]
