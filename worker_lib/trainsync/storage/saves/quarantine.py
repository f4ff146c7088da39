"""Quarantine requests: committed checkpoints to be read in full before an attempt resumes.

Left by a rank that could not load one, or by a rank of a local run that has no monitor to ask;
settled by the run's monitor, which reads the files itself. A request outlives the process that made
it, so that the next attempt does not meet the same damage. Each attempt reads such a checkpoint
once, however many ranks ask for it.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import ConfigDict, TypeAdapter

from trainsync.storage import atomic, records
from trainsync.storage.errors import DamagedFileError
from trainsync.storage.layout import RunDirectory, parse_step
from trainsync.storage.saves.receipts import Count


@dataclass(frozen=True, kw_only=True)
class QuarantineRequest:
    """Attempt ``attempt`` wants the checkpoint of ``step`` read.

    ``reason`` is what a rank met; None when it only asks. ``verdict`` is what is wrong with the
    files when there is no older checkpoint to go on from; None while that is not known. When the
    request is settled in any other way, it is gone.
    """

    __pydantic_config__: ClassVar[ConfigDict] = records.RECORD_CONFIG

    step: Count
    manifest_digest: str
    attempt: Count
    reason: str | None = None
    verdict: str | None = None
    version: Literal[1] = 1


_REQUEST = TypeAdapter(QuarantineRequest)
_SUFFIX = ".json"


def write_request(run: RunDirectory, request: QuarantineRequest) -> None:
    """Replace the step's request, atomically. Raises `OSError`."""
    atomic.make_directory(run.quarantine_requests)
    atomic.write_bytes(run.quarantine_request(request.step), records.encode(_REQUEST, request))


def request_quarantine(run: RunDirectory, request: QuarantineRequest) -> None:
    """Leave a request, unless the same attempt's stands there and says as much.

    Raises `OSError`.
    """
    try:
        there = read_request(run, request.step)
    except DamagedFileError:
        there = None
    if there is None or not _says_as_much(there, request):
        write_request(run, request)


def read_request(run: RunDirectory, step: int) -> QuarantineRequest | None:
    """The request for that step, or None. Raises `DamagedFileError`, `OSError`."""
    try:
        return records.read(_REQUEST, run.quarantine_request(step))
    except FileNotFoundError:
        return None


def requested_steps(run: RunDirectory) -> list[int]:
    """Steps with a request, in order. Raises `OSError`."""
    try:
        names = [path.name for path in run.quarantine_requests.iterdir() if path.suffix == _SUFFIX]
    except FileNotFoundError:
        return []
    steps = (parse_step(name.removesuffix(_SUFFIX)) for name in names)
    return sorted(step for step in steps if step is not None)


def remove_request(run: RunDirectory, step: int) -> None:
    """Remove a settled request; none there is fine. Raises `OSError`."""
    run.quarantine_request(step).unlink(missing_ok=True)


def _says_as_much(there: QuarantineRequest, request: QuarantineRequest) -> bool:
    same = (there.manifest_digest, there.attempt) == (request.manifest_digest, request.attempt)
    return same and (there.reason is not None or request.reason is None)
