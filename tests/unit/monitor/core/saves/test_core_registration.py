"""Registrations: before and after receipts, repeated, contradicting, and of impossible steps."""

from pathlib import Path

import pytest
from pydantic import ValidationError
from trainsync.api.base import Model
from trainsync.api.protocol import (
    FailureReport,
    ParticipantRef,
    ReceiptHint,
    SaveRequest,
    SaveState,
)
from trainsync.monitor import errors
from trainsync.storage.layout import MAX_STEP

from tests.unit.monitor.core.cores import Start
from tests.unit.monitor.saves import CHECKPOINT, FIRST, request, write_all


def test_receipts_may_come_before_the_registration(start: Start, tmp_path: Path) -> None:
    core = start()
    write_all(tmp_path, FIRST, 10)
    core.tick()
    assert core.saves.save_status(FIRST, CHECKPOINT, 10).state is SaveState.UNKNOWN
    assert core.saves.register(FIRST, request(10)).state is SaveState.COMMITTED


def test_registering_again_is_answered_and_contradicting_is_refused(
    start: Start, tmp_path: Path
) -> None:
    core = start()
    core.saves.register(FIRST, request(10))
    core.saves.register(FIRST, request(10))
    with pytest.raises(errors.InvalidRequestError, match="other participants"):
        core.saves.register(FIRST, request(10, ranks=3))
    twice = [ParticipantRef(component="model", rank=0)] * 2
    with pytest.raises(errors.InvalidRequestError, match="listed twice"):
        core.saves.register(FIRST, SaveRequest(kind=CHECKPOINT, step=11, participants=twice))
    write_all(tmp_path, FIRST, 10)
    core.tick()
    assert core.saves.register(FIRST, request(10)).state is SaveState.COMMITTED


@pytest.mark.parametrize("message", [SaveRequest, ReceiptHint, FailureReport])
def test_a_step_that_has_no_directory_is_refused_at_the_door(message: type[Model]) -> None:
    who = {"component": "model", "rank": 0}
    said = {"kind": "checkpoint", "participants": [who], "participant": who, "error": "x"}
    fields = {name: value for name, value in said.items() if name in message.model_fields}
    message.model_validate({**fields, "step": MAX_STEP})
    with pytest.raises(ValidationError, match="step"):
        message.model_validate({**fields, "step": MAX_STEP + 1})
