"""Committed saves next to their manifests: by size at once, by digest with `inspect_reading`."""

import math
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from trainsync.api.protocol import SaveKind
from trainsync.storage import atomic
from trainsync.storage.errors import DamagedFileError, UnsafePathError
from trainsync.storage.inspect.digests import ExpectedFile, read_all
from trainsync.storage.inspect.findings import Code, Finding, Severity, relative
from trainsync.storage.layout import RunDirectory, inside, step_name
from trainsync.storage.saves import manifest
from trainsync.storage.saves.manifest import Committed
from trainsync.storage.saves.receipts import FileEntry


@dataclass(frozen=True)
class InspectedSave:
    """A manifest that is there, and what is wrong with it and its files.

    ``committed`` is None when the manifest cannot be understood.
    """

    step: int
    kind: SaveKind
    committed: Committed | None
    findings: tuple[Finding, ...] = ()

    @property
    def valid(self) -> bool:
        """Whether all that was checked is as it must be."""
        return not self.findings

    @property
    def files(self) -> tuple[FileEntry, ...]:
        """The files that the manifest lists."""
        return self.committed.manifest.files if self.committed else ()


def committed_pairs(run: RunDirectory, step: int | None = None) -> list[tuple[int, SaveKind]]:
    """(step, kind) of every manifest, damaged ones too, or of those at ``step``; in order."""
    steps = run.steps() if step is None else [s for s in run.steps() if s == step]
    return [(s, k) for s in steps for k in SaveKind if atomic.is_there(run.manifest(k, s))]


def check_sizes(run: RunDirectory, step: int, kind: SaveKind) -> InspectedSave | None:
    """Compare every file with the manifest by size; None when the manifest is gone by now.

    Raises:
        OSError: the volume cannot be read.
    """
    path = run.manifest(kind, step)
    try:
        committed = manifest.read_manifest(run, kind, step)
    except FileNotFoundError:
        return None
    except DamagedFileError as error:
        finding = Finding(
            Severity.DAMAGE, Code.MANIFEST, relative(run, path), error.why, step, kind
        )
        return InspectedSave(step, kind, None, (finding,))
    findings = []
    for entry in committed.manifest.files:
        problem = _size_problem(run.step(step), entry)
        if problem is not None:
            findings.append(_file_finding(step, kind, entry, *problem))
    return _unless_removed(run, InspectedSave(step, kind, committed, tuple(findings)))


def check_all_sizes(run: RunDirectory, step: int | None = None) -> list[InspectedSave]:
    """`check_sizes` of every save, or of those at ``step``, in order."""
    found = [check_sizes(run, s, kind) for s, kind in committed_pairs(run, step)]
    return [save for save in found if save is not None]


def as_trained(saves: Iterable[InspectedSave], kind: SaveKind, uid: str) -> list[int]:
    """Steps of ``kind`` in the order of training, as the run ``uid`` counts: what a newer attempt
    trained again is newer."""

    def age(save: InspectedSave) -> tuple[tuple[bool, float, int], int]:
        # One that cannot be read is not the first to go.
        found = save.committed.manifest.age(uid) if save.committed else (True, math.inf, 0)
        return found, save.step

    return [save.step for save in sorted((s for s in saves if s.kind is kind), key=age)]


def bytes_to_read(saves: Iterable[InspectedSave]) -> int:
    """The bytes that `check_digests` will read."""
    return sum(reading.entry.bytes for reading in _readings(RunDirectory(Path()), saves))


def check_digests(
    run: RunDirectory,
    saves: Iterable[InspectedSave],
    *,
    threads: int,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> list[InspectedSave]:
    """Read every file whose size is right, and add what differs to the saves' findings.

    A file that two kinds share is read once. A save that retention removes meanwhile is left out.

    Args:
        on_bytes: told how many more bytes were read, from several threads.

    Raises:
        OSError: the volume cannot be read. (A file alone that cannot is a finding.)
    """
    saves = list(saves)
    problems = read_all(_readings(run, saves), threads=threads, on_bytes=on_bytes)
    checked = []
    for save in saves:
        more = [
            _file_finding(save.step, save.kind, entry, *problem)
            for entry in save.files
            if (problem := problems.get(ExpectedFile(run.step(save.step), entry))) is not None
        ]
        found = _unless_removed(run, replace(save, findings=(*save.findings, *more)))
        if found is not None:
            checked.append(found)
    return checked


def _readings(run: RunDirectory, saves: Iterable[InspectedSave]) -> list[ExpectedFile]:
    wanted: dict[ExpectedFile, None] = {}  # in order, each once
    for save in saves:
        bad = {finding.path for finding in save.findings}
        for entry in save.files:
            if _name(save.step, entry) not in bad:
                wanted[ExpectedFile(run.step(save.step), entry)] = None
    return list(wanted)


def _unless_removed(run: RunDirectory, save: InspectedSave) -> InspectedSave | None:
    if save.findings and not atomic.is_there(run.manifest(save.kind, save.step)):
        return None  # a monitor's retention renamed the step away while we looked
    return save


def _size_problem(base: Path, entry: FileEntry) -> tuple[Code, str] | None:
    try:
        info = inside(base, entry.path).lstat()
    except FileNotFoundError:
        return Code.MISSING, f"is missing, expected {entry.bytes} bytes"
    except (UnsafePathError, NotADirectoryError) as error:
        return Code.NOT_A_FILE, f"is refused: {error}"
    if not stat.S_ISREG(info.st_mode):
        return Code.NOT_A_FILE, "is not a regular file"
    if info.st_size != entry.bytes:
        return Code.SIZE, f"has {info.st_size} bytes, expected {entry.bytes}"
    return None


def _file_finding(step: int, kind: SaveKind, entry: FileEntry, code: Code, message: str) -> Finding:
    return Finding(Severity.DAMAGE, code, _name(step, entry), message, step, kind)


def _name(step: int, entry: FileEntry) -> str:
    return f"{step_name(step)}/{entry.path}"
