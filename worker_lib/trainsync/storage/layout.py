"""Where everything is in a run's directory; see docs/dev/contracts.md for the picture."""

import os
import re
import stat
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path, PurePosixPath
from typing import Final

from trainsync.api.protocol import SaveKind
from trainsync.storage.errors import UnsafePathError

STAGING: Final = ".staging"
INTERNAL: Final = ".trainsync"
POINTERS: Final = {
    SaveKind.CHECKPOINT: "latest_checkpointed_iteration.txt",
    SaveKind.STATE_DICT: "latest_state_dict_iteration.txt",
}
FAILURE_SUFFIX: Final = ".failed.json"
RECEIPT_SUFFIX: Final = ".json"
MAX_STEP: Final = 2**53  # what a JSON number holds exactly


def manifest_name(kind: SaveKind) -> str:
    """Name of the file at the top of a step that makes a save of ``kind`` committed."""
    return f"MANIFEST.{kind.value}.json"


def set_aside_name(kind: SaveKind) -> str:
    """Name that a manifest gets when its files were found damaged: the save counts no more."""
    return f"{manifest_name(kind)}.damaged"


_RESERVED: Final = frozenset(
    name for kind in SaveKind for name in (manifest_name(kind), set_aside_name(kind))
)
_STEP = re.compile(r"^global_step_(0|[1-9][0-9]{0,15})$")
_INCARNATION = re.compile(r"^[a-z0-9]{8,32}$")
_COMPONENT = re.compile(r"^[a-z0-9_]{1,64}$")
_OWNER = re.compile(r"^(0|[1-9][0-9]*)-([a-z0-9]{8,32})$")


def step_name(step: int) -> str:
    """Name of a step's directory, as verl has it."""
    if not 0 <= step <= MAX_STEP:
        raise UnsafePathError(f"step {step} is not between 0 and {MAX_STEP}")
    return f"global_step_{step}"


def parse_step(name: str) -> int | None:
    """Inverse of `step_name`; None for any other name."""
    match = _STEP.fullmatch(name)
    step = int(match[1]) if match else None
    return step if step is not None and step <= MAX_STEP else None


def parse_owner(name: str) -> tuple[int, str] | None:
    """Attempt and incarnation of a directory in ``.staging``; None for any other name."""
    match = _OWNER.match(name)
    return (int(match[1]), match[2]) if match else None


def relative_path(text: str) -> PurePosixPath:
    """``text`` as a path that stays below where it starts. Raises as `relative_parts`."""
    return PurePosixPath(*relative_parts(text))


def relative_parts(text: str) -> list[str]:
    """Names on the way along ``text``, which stays below where it starts.

    Raises:
        UnsafePathError: it is empty, absolute, has ``..``, ``.``, an empty part, or a NUL.
    """
    parts = text.split("/")
    if not text or "\0" in text or any(part in ("", ".", "..") for part in parts):
        raise UnsafePathError(
            f"{text!r} is not a plain relative path (no '..', '.', leading '/' or empty part)"
        )
    return parts


def own_name(writer: str) -> str:
    """Name in ``files/`` of the directory of one writer's files."""
    return f"by-{writer}"


def is_reserved(name: str) -> bool:
    """Whether the monitor keeps that name at the top of a step for itself."""
    return name in _RESERVED


def check_not_reserved(text: str) -> None:
    """See that a participant's file does not take a name that the monitor keeps for itself.

    Raises:
        UnsafePathError: it lies at, or below, the name of a manifest.
    """
    first = relative_parts(text)[0]
    if first in _RESERVED:
        raise UnsafePathError(
            f"{text!r} is refused: at the top of a step {first} is the monitor's own; choose "
            "another name or a sub-folder"
        )


def inside(base: Path, text: str) -> Path:
    """``base``/``text``, where no part below ``base`` is a symbolic link (missing parts may be).

    Raises:
        UnsafePathError: see `relative_path`; or a part is a symbolic link.
    """
    return Path(look_inside(base, text)[0])


def look_inside(base: Path, text: str) -> tuple[str, os.stat_result | None]:
    """`inside` as a string, and what is there; None: nothing is.

    Raises:
        UnsafePathError: see `inside`.
    """
    # With strings, not paths: a save has thousands of files, and the monitor asks for each.
    current, info = os.fspath(base), None
    for part in relative_parts(text):
        current = f"{current}/{part}"
        try:
            info = os.lstat(current)
        except FileNotFoundError:
            info = None
            continue
        if stat.S_ISLNK(info.st_mode):
            raise UnsafePathError(f"{current} is a symbolic link, which is refused")
    return current, info


@dataclass(frozen=True)
class SaveDirectory:
    """The staging directory of one save of one incarnation.

    Its paths are kept, as are those of `RunDirectory`: to join them took a tenth of a commit.
    """

    path: Path

    @cached_property
    def files(self) -> Path:
        """Files that will be promoted to ``global_step_N/``, with the same relative paths."""
        return self.path / "files"

    def files_of(self, writer: str | None) -> Path:
        """Where that writer's files lie until they are promoted: no other writer's take their
        place. None: a writer of an older release, whose files lie in ``files/`` itself."""
        return self.files if writer is None else self.files / own_name(writer)

    @cached_property
    def receipts(self) -> Path:
        """One receipt, or failure, of every participant."""
        return self.path / "receipts"

    @cached_property
    def rescues(self) -> Path:
        """One record of every participant whose process died before its receipt."""
        return self.path / "rescues"

    @cached_property
    def copies_wanted(self) -> Path:
        """An empty file: no process of the save's incarnation lives, and parts of which nothing is
        heard may be written from copies in memory."""
        return self.path / "COPIES_WANTED"

    @cached_property
    def withdrawn(self) -> Path:
        """An empty file, made before a receipt is withdrawn: the monitor may know that one still,
        and looks at all of them again before it commits."""
        return self.path / "WITHDRAWN"

    @cached_property
    def registration(self) -> Path:
        """Written by the monitor: the participants."""
        return self.path / "REGISTRATION.json"

    @cached_property
    def aborted(self) -> Path:
        """Written by the monitor: the save will never commit, and why."""
        return self.path / "ABORTED.json"

    @cached_property
    def committed(self) -> Path:
        """Written by the monitor once the manifest stands; outlives retention of the step."""
        return self.path / "COMMITTED.json"

    def receipt(self, component: str, rank: int) -> Path:
        """Written by the participant when the bytes of its files are durable."""
        return self.receipts / f"{participant_name(component, rank)}{RECEIPT_SUFFIX}"

    def failure(self, component: str, rank: int) -> Path:
        """Written by the participant when it could not save."""
        return self.receipts / f"{participant_name(component, rank)}{FAILURE_SUFFIX}"

    def rescue(self, component: str, rank: int) -> Path:
        """Written by what outlives the participant's process."""
        return self.rescues / f"{participant_name(component, rank)}{RECEIPT_SUFFIX}"


@dataclass(frozen=True)
class RunDirectory:
    """A run's directory on the volume."""

    root: Path

    @cached_property
    def staging(self) -> Path:
        """The directory that workers write into."""
        return self.root / STAGING

    @cached_property
    def claims(self) -> Path:
        """The directory of claims: which incarnation runs, or ran, each attempt."""
        return self.root / INTERNAL / "claims"

    @cached_property
    def resume_target(self) -> Path:
        """Names the step resumed from; see `trainsync.storage.saves.resume_target`."""
        return self.root / INTERNAL / "RESUME.json"

    @cached_property
    def rollback(self) -> Path:
        """The newest request to go back; see `trainsync.storage.saves.rollback`."""
        return self.root / INTERNAL / "ROLLBACK.json"

    @cached_property
    def account(self) -> Path:
        """Where the run's seconds went; see `trainsync.monitor.account.account`."""
        return self.root / INTERNAL / "ACCOUNT.json"

    @cached_property
    def rolled_back(self) -> Path:
        """Steps that a rollback has put aside, in a folder for each; they are the user's to keep
        or to delete."""
        return self.root / "rolled_back"

    @cached_property
    def quarantine_requests(self) -> Path:
        """Checkpoints to be read before a resume; see `trainsync.storage.saves.quarantine`."""
        return self.root / INTERNAL / "doubts"

    def quarantine_request(self, step: int) -> Path:
        """The file of a step's quarantine request."""
        return self.quarantine_requests / f"{step_name(step)}.json"

    @cached_property
    def superseding(self) -> Path:
        """Saves that take a committed one's place; see `trainsync.storage.saves.superseding`."""
        return self.root / INTERNAL / "superseding"

    @cached_property
    def leases(self) -> Path:
        """Leases that readers hold at present; see `trainsync.storage.leases`."""
        return self.root / INTERNAL / "leases"

    def attempt_lock(self, attempt: int) -> Path:
        """The lock that an attempt's local monitor, or its successor's claim, holds."""
        return self.root / INTERNAL / "turns" / f"{attempt}.lock"

    @cached_property
    def host_lock(self) -> Path:
        """Held by the process that hosts the monitor of a local run."""
        return self.root / INTERNAL / "host.lock"

    @cached_property
    def write_lock(self) -> Path:
        """Held by the rank that may write, where a local run's save strategy limits that."""
        return self.root / INTERNAL / "write.lock"

    @cached_property
    def memory_key(self) -> Path:
        """By which processes of the run that exchange shards in memory know one another."""
        return self.root / INTERNAL / "memory.key"

    @cached_property
    def trash(self) -> Path:
        """The trash: files that are being deleted and count no more."""
        return self.root / INTERNAL / "trash"

    def pointer(self, kind: SaveKind) -> Path:
        """File that holds the newest committed step of ``kind``."""
        return self.root / POINTERS[kind]

    def step(self, step: int) -> Path:
        """Directory of a step's committed files."""
        return _step_directory(self.root, step)

    def manifest(self, kind: SaveKind, step: int) -> Path:
        """The file that makes a save of ``kind`` at ``step`` committed."""
        return self.step(step) / manifest_name(kind)

    def set_aside(self, kind: SaveKind, step: int) -> Path:
        """Where the manifest of a save goes whose files have changed; see `manifest.set_aside`."""
        return self.step(step) / set_aside_name(kind)

    def owner(self, attempt: int, incarnation: str) -> Path:
        """Staging of one incarnation of an attempt."""
        if attempt < 0 or not _INCARNATION.match(incarnation):
            raise UnsafePathError(
                f"attempt {attempt}, incarnation {incarnation!r}: expected a number ≥ 0 and 8 to "
                "32 lower-case letters and digits"
            )
        return self.staging / f"{attempt}-{incarnation}"

    def writers(self, attempt: int, incarnation: str) -> Path:
        """Claims of the writers of that incarnation; see `trainsync.storage.saves.writers`."""
        return self.owner(attempt, incarnation) / "writers"

    def copy_holders(self, attempt: int, incarnation: str) -> Path:
        """The processes of that incarnation that take copies of shards kept in memory."""
        return self.owner(attempt, incarnation) / "keepers"

    def save(self, attempt: int, incarnation: str, kind: SaveKind, step: int) -> SaveDirectory:
        """Staging of one save."""
        return _save_directory(self, attempt, incarnation, kind, step)

    def steps(self) -> list[int]:
        """Steps that have a directory, in order; whether they are committed, manifests say."""
        try:
            with os.scandir(self.root) as entries:
                found = [
                    step
                    for entry in entries
                    if (step := parse_step(entry.name)) is not None
                    and entry.is_dir(follow_symlinks=False)
                ]
        except FileNotFoundError:
            return []
        return sorted(found)


# The monitor asks for the same few directories again and again.
_KEPT: Final = 512


@lru_cache(_KEPT)
def _step_directory(root: Path, step: int) -> Path:
    return root / step_name(step)


@lru_cache(_KEPT)
def _save_directory(
    run: RunDirectory, attempt: int, incarnation: str, kind: SaveKind, step: int
) -> SaveDirectory:
    return SaveDirectory(run.owner(attempt, incarnation) / kind.value / step_name(step))


def participant_name(component: str, rank: int) -> str:
    """``component.rank``, for names of records. Raises `UnsafePathError`: it can be no name."""
    if rank < 0 or not _COMPONENT.match(component):
        raise UnsafePathError(
            f"participant {component!r} of rank {rank}: expected [a-z0-9_]{{1,64}} and a rank ≥ 0"
        )
    return f"{component}.{rank}"
