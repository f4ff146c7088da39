"""Sentences that say how a run goes on from a damaged save, and which command does it at once."""

from collections.abc import Iterator, Sequence
from typing import Final

from trainsync.api.protocol import SaveKind
from trainsync.cli.checkpoints.places import CheckpointPlace, DirectoryPlace
from trainsync.storage.inspect.findings import Code
from trainsync.storage.inspect.saves import InspectedSave

JUDGED_BY_SIZE: Final = "saves were judged by the sizes of their files"
_ONLY_BY_READING: Final = (Code.DIGEST, Code.UNREADABLE)


def of_damaged_targets(place: CheckpointPlace, saves: Sequence[InspectedSave]) -> Iterator[str]:
    """A sentence for each of ``saves`` that is damaged and named by the pointer of its kind."""
    for report in place.reports(saves):
        save = report.save
        if report.pointed_at and not save.valid:
            yield _remedy(place, save)


def _remedy(place: CheckpointPlace, save: InspectedSave) -> str:
    codes = {finding.code for finding in save.findings}
    needs_reading = codes <= set(_ONLY_BY_READING)
    digest = "--digest " if needs_reading else ""
    command = f"`trainsync checkpoints repair {digest}{place.name}`"
    sentence = f"{command} moves the pointer to the newest {save.kind.value} that is whole"
    if not isinstance(place, DirectoryPlace) or save.kind is not SaveKind.CHECKPOINT:
        return sentence
    if not needs_reading:
        return f"{sentence}; the run's next start resumes from that one, too"
    return (
        f"{sentence}. Without it the run's next start fails on step {save.step}, and the start "
        "after it resumes from that one (with checkpoint.verify: digest the next start does)"
    )
