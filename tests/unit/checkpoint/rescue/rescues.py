"""Helpers for tests of parts that are finished after their processes died."""

from datetime import UTC, datetime
from pathlib import Path

from trainsync.api.protocol import SaveKind
from trainsync.checkpoint.rescue.messages import KeptPart, PartKey
from trainsync.checkpoint.save.places.volume import VolumePlace
from trainsync.storage.layout import RunDirectory, SaveDirectory
from trainsync.storage.saves import receipts
from trainsync.storage.saves.receipts import FileEntry, Participant, Receipt, SaveRegistration

from tests.unit.checkpoint.memory.keeping import INCARNATION, digest_of
from tests.unit.checkpoint.memory.keeping import Keeping as Keeping

CHECKPOINT = SaveKind.CHECKPOINT
DEAD = "0123456789abcdee"
"""The writer that the dead rank was."""
PATH = "actor/model_world_size_2_rank_{}.pt"
DATA = bytes(range(256)) * 40_000
"""Of two blocks and a half."""


def part_of(step: int, rank: int = 0) -> PartKey:
    return PartKey(CHECKPOINT, step, Participant("model", rank))


def receipt_of(step: int, rank: int = 0, data: bytes = DATA) -> Receipt:
    return Receipt(
        kind=CHECKPOINT,
        step=step,
        attempt=0,
        incarnation=INCARNATION,
        component="model",
        rank=rank,
        world_size=2,
        files=(FileEntry(PATH.format(rank), len(data), digest_of(data)),),
        seconds=0.25,
    )


class Saving:
    """Saves of two ranks below ``directory``, as far as they came before the ranks died."""

    def __init__(self, directory: Path) -> None:
        self.keeping = Keeping(directory)
        self.run = RunDirectory(directory / "run")
        self.place = VolumePlace(self.run, 0, INCARNATION, continues=DEAD)

    def save(self, step: int) -> SaveDirectory:
        return self.run.save(0, INCARNATION, CHECKPOINT, step)

    def register(self, step: int, kind: SaveKind = CHECKPOINT) -> None:
        receipts.write_registration(
            self.run.save(0, INCARNATION, kind, step),
            SaveRegistration(
                kind=kind,
                step=step,
                attempt=0,
                incarnation=INCARNATION,
                run_uid="uid",
                participants=(Participant("model", 0), Participant("model", 1)),
                created_at=datetime.now(UTC),
            ),
        )

    def keep(
        self, step: int, rank: int = 0, attachments: dict[str, bytes] | None = None
    ) -> KeptPart:
        """A part that is whole in memory."""
        self.keeping.keep(step, DATA, Participant("model", rank))
        (kept,) = [
            one
            for one in self.keeping.names()
            if (one.step, one.part) == (step, f"model-{rank}") and one.digest is not None
        ]
        return KeptPart(
            file=self.keeping.place.path(kept),
            receipt=receipt_of(step, rank),
            attachments=attachments or {},
        )

    def written(self, step: int) -> list[Receipt]:
        save = self.save(step)
        return [
            receipts.read_receipt(path)
            for path in sorted(save.receipts.glob("*.json"))
            if not path.name.endswith(".failed.json")
        ]

    def failed(self, step: int) -> list[str]:
        paths = sorted(self.save(step).receipts.glob("*.failed.json"))
        return [receipts.read_failure(path).error for path in paths]

    def bytes_of(self, receipt: Receipt) -> dict[str, bytes]:
        files = self.save(receipt.step).files_of(receipt.writer)
        return {entry.path: (files / entry.path).read_bytes() for entry in receipt.files}
