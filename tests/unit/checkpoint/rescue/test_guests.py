"""What outlives a process hears of copies that this one took, until their saves have ended."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from trainsync.api.protocol import SaveKind
from trainsync.checkpoint.memory.kept import SealedFile
from trainsync.checkpoint.rescue.guests import GuestParts
from trainsync.checkpoint.rescue.messages import AboutCopy, KeptPart, PartKey, encode_about
from trainsync.storage.saves.receipts import Participant, Receipt

from tests.unit.checkpoint.memory.keeping import INCARNATION, digest_of
from tests.unit.checkpoint.rescue.rescues import DATA, DEAD, PATH, part_of, receipt_of

SMALL = {"actor/config.json": b"\xff{}"}


class Told:
    """In place of a `Rescuer`."""

    def __init__(self) -> None:
        self.copies: dict[PartKey, tuple[KeptPart, str]] = {}

    def copied(self, part: PartKey, kept: KeptPart, writer: str) -> None:
        self.copies[part] = (kept, writer)

    def ended(self, part: PartKey) -> None:
        del self.copies[part]


@pytest.fixture
def told() -> Told:
    return Told()


@pytest.fixture
def guests(told: Told) -> GuestParts:
    return GuestParts(told, 0, INCARNATION)  # type: ignore[arg-type]


def copy_of(
    step: int, receipt: Receipt | None = None, writer: str = DEAD, **changes: Any
) -> SealedFile:
    receipt = receipt_of(step, 1) if receipt is None else receipt
    about = encode_about(AboutCopy(receipt=receipt, attachments=SMALL, writer=writer))
    file = SealedFile(
        Path(f"/shm/guests/{step}"),
        step,
        Participant("model", 1),
        len(DATA),
        digest_of(DATA),
        lambda _: about,
    )
    return replace(file, **changes)


def test_a_copy_is_told_of_with_all_that_its_part_needs(told: Told, guests: GuestParts) -> None:
    guests.taken(copy_of(5))
    kept = KeptPart(file=Path("/shm/guests/5"), receipt=receipt_of(5, 1), attachments=SMALL)
    assert told.copies == {part_of(5, 1): (kept, DEAD)}


@pytest.mark.parametrize(
    "file",
    [
        copy_of(5, receipt_of(6, 1)),
        copy_of(5, receipt_of(5, 0)),
        copy_of(5, replace(receipt_of(5, 1), attempt=1)),
        copy_of(5, replace(receipt_of(5, 1), incarnation="f" * 16)),
        copy_of(5, replace(receipt_of(5, 1), writer=DEAD)),
        copy_of(5, replace(receipt_of(5, 1), kept={PATH.format(1): "global_step_4/x"})),
        copy_of(5, writer="x/../../other"),
        copy_of(5, bytes=1),
        copy_of(5, digest=digest_of(b"other")),
        copy_of(5, describe=lambda _: b"{"),
    ],
)
def test_what_speaks_of_another_file_is_not_told(
    told: Told, guests: GuestParts, file: SealedFile, caplog: pytest.LogCaptureFixture
) -> None:
    guests.taken(file)
    assert told.copies == {}
    assert "is not understood" in caplog.text


def test_a_copy_with_nothing_beside_is_for_loads_alone(
    told: Told, guests: GuestParts, caplog: pytest.LogCaptureFixture
) -> None:
    guests.taken(copy_of(5, describe=lambda _: b""))
    assert told.copies == {}
    assert caplog.text == ""


def test_a_commit_ends_what_is_older_and_an_abort_its_own_step(
    told: Told, guests: GuestParts
) -> None:
    for step in (4, 5, 6, 7):
        guests.taken(copy_of(step))
    state_dict = replace(receipt_of(5, 1), kind=SaveKind.STATE_DICT)
    guests.taken(copy_of(5, state_dict))
    guests.ended(7, committed=False)
    assert {(part.kind, part.step) for part in told.copies} == {
        *((SaveKind.CHECKPOINT, step) for step in (4, 5, 6)),
        (SaveKind.STATE_DICT, 5),
    }
    guests.ended(5, committed=True)
    assert {(part.kind, part.step) for part in told.copies} == {
        (SaveKind.CHECKPOINT, 6),
        (SaveKind.STATE_DICT, 5),
    }
    guests.ended(6, committed=True)
    assert told.copies == {}
