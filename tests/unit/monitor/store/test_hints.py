"""Hints of receipts: of many ranks that end at once a few hints are enough."""

from typing import Any

import pytest
from trainsync.api.protocol import ParticipantRef, ReceiptHint, SaveState
from trainsync.monitor.ledger.saves import SaveOwner
from trainsync.monitor.store.core import StoreCore

from tests.unit.monitor.store.runs import CHECKPOINT, Run, request, state

RANKS = 40
PARTS = [("model", rank) for rank in range(RANKS)]
FEW = 17


def hint(core: StoreCore, owner: SaveOwner, rank: int) -> None:
    who = ParticipantRef(component="model", rank=rank)
    core.saves.receipt_hint(owner, ReceiptHint(kind=CHECKPOINT, step=5, participant=who))


def test_when_all_receipts_are_there_a_few_hints_commit_the_save() -> None:
    run = Run()
    core, owner = run.monitor(0)
    core.saves.register(owner, request(5, *PARTS))
    for part in PARTS:
        run.write(owner, 5, part)
    for rank in range(FEW):
        hint(core, owner, rank)
    assert state(core, owner, 5) is SaveState.COMMITTED


def test_a_receipt_that_a_late_listing_lacks_is_taken_by_its_own_hint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = Run()
    core, owner = run.monitor(0)
    core.saves.register(owner, request(5, *PARTS))
    for part in PARTS:
        run.write(owner, 5, part)
    below: Any = run.bucket.below
    late = f"model.{FEW - 1}.json"
    monkeypatch.setattr(
        run.bucket,
        "below",
        lambda folder: [info for info in below(folder) if not info.key.endswith(late)],
    )
    for rank in range(FEW - 1):
        hint(core, owner, rank)
    assert state(core, owner, 5) is not SaveState.COMMITTED
    hint(core, owner, FEW - 1)
    assert state(core, owner, 5) is SaveState.COMMITTED
