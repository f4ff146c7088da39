"""What ``trainsync checkpoints`` shows, as plain data. Reads only."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trainsync.api.base import format_time
from trainsync.api.protocol import SaveKind
from trainsync.storage import manifest, pointers
from trainsync.storage.errors import DamagedFileError, FileCheckError
from trainsync.storage.layout import RunDirectory
from trainsync.storage.receipts import FileEntry


@dataclass(frozen=True)
class SaveReport:
    """One manifest; ``problem`` says what is wrong, None when all is well."""

    step: int
    kind: SaveKind
    attempt: int | None
    files: int
    bytes: int
    time: str | None
    digest: str | None
    pointed_at: bool
    problem: str | None

    def to_json_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "step": self.step,
            "kind": self.kind.value,
            "attempt": self.attempt,
            "files": self.files,
            "bytes": self.bytes,
            "time": self.time,
            "manifestDigest": self.digest,
            "pointedAt": self.pointed_at,
            "problem": self.problem,
        }


def steps_to_check(run: RunDirectory, step: int | None) -> list[tuple[int, SaveKind]]:
    """(step, kind) of every manifest, or of those at ``step``, in order."""
    found = [(s, kind) for kind in SaveKind for s in manifest.committed_steps(run, kind)]
    return sorted(pair for pair in found if step is None or pair[0] == step)


def check_save(
    run: RunDirectory,
    step: int,
    kind: SaveKind,
    *,
    with_digest: bool,
    on_file: Callable[[FileEntry], None] = lambda _: None,
) -> SaveReport:
    """Compare a save with its manifest, by size or byte for byte."""
    problem = None
    committed = None
    try:
        committed = manifest.read_manifest(run, kind, step)
        manifest.check_manifest(run, committed.manifest, with_digest=with_digest, on_file=on_file)
    except (FileNotFoundError, DamagedFileError, FileCheckError) as error:
        problem = str(error)
    record = committed.manifest if committed else None
    return SaveReport(
        step=step,
        kind=kind,
        attempt=record.attempt if record else None,
        files=len(record.files) if record else 0,
        bytes=record.bytes if record else 0,
        time=format_time(record.created_at) if record else None,
        digest=committed.digest if committed else None,
        pointed_at=_pointer(run, kind) == step,
        problem=problem,
    )


def pointer_problems(run: RunDirectory) -> list[str]:
    """A sentence for each pointer that names no committed step."""
    problems = []
    for kind in SaveKind:
        try:
            step = pointers.read_pointer(run, kind)
        except DamagedFileError as error:
            problems.append(str(error))
            continue
        if step is not None and not run.manifest(kind, step).is_file():
            problems.append(f"{run.pointer(kind)} names step {step}, which has no manifest")
    return problems


def _pointer(run: RunDirectory, kind: SaveKind) -> int | None:
    try:
        return pointers.read_pointer(run, kind)
    except DamagedFileError:
        return None  # reported by `pointer_problems`
