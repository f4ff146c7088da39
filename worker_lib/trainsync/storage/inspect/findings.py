"""Findings: entries of a run's directory that do not belong there. Reading changes nothing."""

import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from trainsync.api.protocol import SaveKind
from trainsync.storage.errors import UnsafePathError
from trainsync.storage.layout import INTERNAL, POINTERS, STAGING, RunDirectory, inside, parse_step


class Severity(StrEnum):
    """Damage: something committed is not what it must be. Leftover: harmless."""

    DAMAGE = "damage"
    LEFTOVER = "leftover"


class Code(StrEnum):
    """The kind of a finding; stable, for programs."""

    MISSING = "missing"
    NOT_A_FILE = "not_a_file"
    SIZE = "size"
    DIGEST = "digest"
    UNREADABLE = "unreadable"
    MANIFEST = "manifest"
    MANIFEST_MISSING = "manifest_missing"
    MANIFEST_CHANGED = "manifest_changed"
    POINTER = "pointer"
    POINTER_DANGLING = "pointer_dangling"
    POINTER_BEHIND = "pointer_behind"
    CLAIM = "claim"
    RESUME_TARGET = "resume_target"
    ASIDE = "aside"
    NOT_A_DIRECTORY = "not_a_directory"
    UNLISTED = "unlisted"
    HALF_PROMOTED = "half_promoted"
    SET_ASIDE = "set_aside"
    TEMPORARY = "temporary"
    STAGING = "staging"
    TRASH = "trash"
    LEASE = "lease"
    DOUBT = "doubt"


@dataclass(frozen=True)
class Finding:
    """One thing found; ``message`` goes on after ``path``, which is relative to the directory.

    ``objects``: of damage in a store, the keys of the objects that are damaged.
    """

    severity: Severity
    code: Code
    path: str
    message: str
    step: int | None = None
    kind: SaveKind | None = None
    objects: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.path}: {self.message}"

    @property
    def is_damage(self) -> bool:
        """Whether something committed is not what it must be."""
        return self.severity is Severity.DAMAGE

    def to_json_dict(self) -> dict[str, object]:
        """The finding for ``--json``."""
        return {
            "severity": self.severity.value,
            "code": self.code.value,
            "path": self.path,
            "message": self.message,
            "step": self.step,
            "kind": None if self.kind is None else self.kind.value,
        }


def in_order(findings: Iterable[Finding]) -> list[Finding]:
    """Damage first, then by path."""
    return sorted(findings, key=lambda f: (not f.is_damage, f.path, f.code))


def relative(run: RunDirectory, path: Path) -> str:
    """``path`` as findings name it."""
    return path.relative_to(run.root).as_posix()


def is_run_directory(run: RunDirectory) -> bool:
    """Whether there is anything of a run in the directory, or nothing at all yet.

    Raises:
        OSError: it cannot be read.
    """
    ours = {STAGING, INTERNAL, *POINTERS.values()}
    names = [entry.name for entry in entries(run.root)]
    return not names or any(name in ours or parse_step(name) is not None for name in names)


def is_real_directory(run: RunDirectory, path: Path) -> bool:
    """Whether ``path``, below the run's directory, is a directory that no symbolic link leads to.

    Raises:
        UnsafePathError: something else is in the way.
        OSError: it cannot be looked at.
    """
    try:
        mode = inside(run.root, relative(run, path)).lstat().st_mode
    except FileNotFoundError:
        return False
    if not stat.S_ISDIR(mode):
        raise UnsafePathError(f"{path} is not a directory")
    return True


def entries(directory: Path) -> list[os.DirEntry[str]]:
    """The entries of ``directory``, by name; none when it is missing or no directory."""
    try:
        with os.scandir(directory) as found:
            return sorted(found, key=lambda entry: entry.name)
    except (FileNotFoundError, NotADirectoryError):
        return []


def walk(directory: Path) -> Iterator[os.DirEntry[str]]:
    """Everything below ``directory``, parents first; links are named, never followed."""
    pending = [directory]
    while pending:
        for entry in entries(pending.pop()):
            yield entry
            if entry.is_dir(follow_symlinks=False):
                pending.append(Path(entry.path))


def walk_files(directory: Path) -> Iterator[os.DirEntry[str]]:
    """`walk` without the directories."""
    return (entry for entry in walk(directory) if not entry.is_dir(follow_symlinks=False))


def refuse_link(run: RunDirectory, directory: Path) -> Finding | None:
    """A finding when ``directory`` is a link or a file: then it is not looked into."""
    try:
        is_real_directory(run, directory)
    except UnsafePathError as error:
        return damage(run, directory, Code.NOT_A_DIRECTORY, f"is refused: {error}")
    return None


def temporary(run: RunDirectory, path: Path, step: int | None = None) -> Finding:
    """A file that an atomic write makes on its way."""
    text = "a temporary file: being written, or left by a killed writer"
    return leftover(run, path, Code.TEMPORARY, text, step)


def leftover(
    run: RunDirectory, path: Path, code: Code, message: str, step: int | None = None
) -> Finding:
    """Something harmless at ``path``."""
    return Finding(Severity.LEFTOVER, code, relative(run, path), message, step)


def damage(
    run: RunDirectory,
    path: Path,
    code: Code,
    message: str,
    step: int | None = None,
    kind: SaveKind | None = None,
) -> Finding:
    """Something wrong at ``path``."""
    return Finding(Severity.DAMAGE, code, relative(run, path), message, step, kind)
