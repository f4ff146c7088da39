"""Doubts: committed checkpoints that are to be read to the last bit before an attempt resumes.

Left by a rank that could not load one, or by a rank of a local run that has no monitor to ask;
settled by the run's monitor, which reads the files itself. A doubt outlives the process that had
it, so that the next attempt does not meet the same damage. Each attempt reads a doubted checkpoint
once, however many ranks doubt it.
"""

from dataclasses import dataclass
from typing import ClassVar, Literal

from pydantic import ConfigDict, TypeAdapter

from trainsync.storage import atomic, records
from trainsync.storage.errors import DamagedFileError
from trainsync.storage.layout import RunDirectory, parse_step
from trainsync.storage.saves.receipts import Count


@dataclass(frozen=True, kw_only=True)
class Doubt:
    """Attempt ``attempt`` wants the checkpoint of ``step`` read.

    ``reason`` is what a rank met; None when it only asks. ``verdict`` is what is wrong with the
    files when there is no older checkpoint to go on from; None while that is not known. When the
    doubt is settled in any other way, it is gone.
    """

    __pydantic_config__: ClassVar[ConfigDict] = records.RECORD_CONFIG

    step: Count
    manifest_digest: str
    attempt: Count
    reason: str | None = None
    verdict: str | None = None
    version: Literal[1] = 1


_DOUBT = TypeAdapter(Doubt)
_SUFFIX = ".json"


def write_doubt(run: RunDirectory, doubt: Doubt) -> None:
    """Replace the step's doubt, atomically. Raises `OSError`."""
    atomic.make_directory(run.doubts)
    atomic.write_bytes(run.doubt(doubt.step), records.encode(_DOUBT, doubt))


def raise_doubt(run: RunDirectory, doubt: Doubt) -> None:
    """Leave a doubt, unless the same attempt's stands there and says as much.

    Raises `OSError`.
    """
    try:
        there = read_doubt(run, doubt.step)
    except DamagedFileError:
        there = None
    if there is None or not _says_as_much(there, doubt):
        write_doubt(run, doubt)


def read_doubt(run: RunDirectory, step: int) -> Doubt | None:
    """None when that step is not doubted. Raises `DamagedFileError`, `OSError`."""
    try:
        return records.read(_DOUBT, run.doubt(step))
    except FileNotFoundError:
        return None


def doubted_steps(run: RunDirectory) -> list[int]:
    """Steps that are doubted, in order. Raises `OSError`."""
    try:
        names = [path.name for path in run.doubts.iterdir() if path.suffix == _SUFFIX]
    except FileNotFoundError:
        return []
    steps = (parse_step(name.removesuffix(_SUFFIX)) for name in names)
    return sorted(step for step in steps if step is not None)


def remove_doubt(run: RunDirectory, step: int) -> None:
    """It is settled; none there is fine. Raises `OSError`."""
    run.doubt(step).unlink(missing_ok=True)


def _says_as_much(there: Doubt, doubt: Doubt) -> bool:
    same = (there.manifest_digest, there.attempt) == (doubt.manifest_digest, doubt.attempt)
    return same and (there.reason is not None or doubt.reason is None)
