"""Findings in the folder `.trainsync`: claims, leases, trash, and saves put aside."""

import time
from collections.abc import Callable, Iterable
from pathlib import Path

from pydantic import TypeAdapter

from trainsync.api.protocol import SaveKind
from trainsync.storage import records
from trainsync.storage.atomic import is_temporary, is_there
from trainsync.storage.errors import DamagedFileError, UnsafePathError
from trainsync.storage.inspect.findings import (
    Code,
    Finding,
    damage,
    entries,
    is_real_directory,
    leftover,
    refuse_link,
    temporary,
)
from trainsync.storage.layout import RunDirectory, parse_step
from trainsync.storage.leases import LeaseBook
from trainsync.storage.saves.claims import Claim, is_claim
from trainsync.storage.saves.quarantine import read_request, requested_steps
from trainsync.storage.saves.resume_target import read_resume_target

_CLAIM = TypeAdapter(Claim)


def in_internal(run: RunDirectory) -> list[Finding]:
    """Finds temporaries, damaged claims, trash, quarantine requests, and leases never released.

    Raises:
        OSError: the volume cannot be read.
    """
    return [
        *_temporaries(run),
        *_resume_target(run),
        *(
            finding
            for directory, look in (
                (run.claims, _claims),
                (run.trash, _trash),
                (run.superseding, _aside),
                (run.leases, _leases),
                (run.quarantine_requests, _quarantine_requests),
            )
            for finding in (_look(run, directory, look))
        ),
    ]


def _look(
    run: RunDirectory, directory: Path, look: Callable[[RunDirectory], Iterable[Finding]]
) -> Iterable[Finding]:
    finding = refuse_link(run, directory)
    return look(run) if finding is None else [finding]


def _claims(run: RunDirectory) -> Iterable[Finding]:
    for entry in entries(run.claims):
        path = Path(entry.path)
        if is_temporary(entry.name):
            yield temporary(run, path)
            continue
        if not is_claim(entry.name):
            continue
        try:
            records.read(_CLAIM, path)
        except FileNotFoundError:
            continue
        except DamagedFileError as error:
            yield damage(run, path, Code.CLAIM, f"{error.why} (no monitor can start)")


def _temporaries(run: RunDirectory) -> Iterable[Finding]:
    internal = run.resume_target.parent
    try:
        found = entries(internal) if is_real_directory(run, internal) else []
    except UnsafePathError:
        return  # `_look` reports the link
    for entry in found:
        if is_temporary(entry.name):
            yield temporary(run, Path(entry.path))


def _resume_target(run: RunDirectory) -> Iterable[Finding]:
    path = run.resume_target
    try:
        if is_real_directory(run, path.parent):
            read_resume_target(run)
    except UnsafePathError:
        return  # `_look` reports the link
    except DamagedFileError as error:
        text = f"{error.why} (retention waits until an attempt resumes)"
        yield damage(run, path, Code.RESUME_TARGET, text)


def _aside(run: RunDirectory) -> Iterable[Finding]:
    lost = dict(out_of_place(run))
    for entry in entries(run.superseding):
        path = Path(entry.path)
        if path in lost:
            text = (
                f"holds step {lost[path]}, which a crash kept from its place; a monitor that "
                "starts, or repair, puts it there"
            )
            yield damage(run, path, Code.ASIDE, text, lost[path], SaveKind.STATE_DICT)
        else:
            text = "what a save that takes another's place has put aside"
            yield leftover(run, path, Code.ASIDE, text)


def out_of_place(run: RunDirectory) -> list[tuple[Path, int]]:
    """Steps that lie aside as a whole, beside what they replace, while nothing is in their place.

    Raises:
        OSError: the volume cannot be read.
    """
    found = []
    for entry in entries(run.superseding):
        path, step = Path(entry.path), parse_step(entry.name.rpartition("-")[2])
        if (
            step is not None
            and not is_there(run.step(step))
            and is_there(path.with_name(f"{path.name}.old"))
            and is_there(path / run.manifest(SaveKind.STATE_DICT, step).name)
        ):
            found.append((path, step))
    return found


def _trash(run: RunDirectory) -> Iterable[Finding]:
    for entry in entries(run.trash):
        text = "was discarded and is not deleted yet"
        yield leftover(run, Path(entry.path), Code.TRASH, text)


def _leases(run: RunDirectory) -> Iterable[Finding]:
    held = LeaseBook(run).in_force(time.monotonic())
    names = {f"{lease.kind.value}-{lease.step}-{lease.holder}.json" for lease in held}
    for entry in entries(run.leases):
        path = Path(entry.path)
        if is_temporary(entry.name):
            yield temporary(run, path)
        elif entry.name.endswith(".json") and entry.name not in names:
            yield leftover(run, path, Code.LEASE, "a lease that is no longer in force")


def _quarantine_requests(run: RunDirectory) -> Iterable[Finding]:
    for entry in entries(run.quarantine_requests):
        if is_temporary(entry.name):
            yield temporary(run, Path(entry.path))
    for step in requested_steps(run):
        try:
            request = read_request(run, step)
        except DamagedFileError as error:
            yield leftover(run, error.path, Code.DOUBT, error.why, step)
            continue
        if request is not None:
            why = request.verdict or request.reason or f"attempt {request.attempt} asks for it"
            text = f"the monitor reads checkpoint {step} before a run resumes from it: {why}"
            yield leftover(run, run.quarantine_request(step), Code.DOUBT, text, step)
