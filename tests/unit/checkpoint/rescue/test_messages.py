"""What a rank tells the process that outlives it comes through whole, however it is cut."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trainsync.api.protocol import SaveKind
from trainsync.checkpoint.rescue.messages import KeptPart, Lines, PartKey, PartTold, encode
from trainsync.storage.saves.receipts import FileEntry, Participant, Receipt

PART = PartKey(SaveKind.CHECKPOINT, 7, Participant("model", 3))
ENTRY = FileEntry("actor/model_world_size_4_rank_3.pt", 10, "xxh3-128:" + "0" * 32)
RECEIPT = Receipt(
    kind=SaveKind.CHECKPOINT,
    step=7,
    attempt=2,
    incarnation="0123456789abcdef",
    component="model",
    rank=3,
    world_size=4,
    files=(ENTRY,),
    seconds=0.5,
    coordinates={"tp": 1},
)


@given(st.binary(max_size=300), st.lists(st.integers(1, 200)))
def test_lines_come_through_whole_however_they_are_cut(data: bytes, cuts: list[int]) -> None:
    kept = KeptPart(file=Path("/shm/ä b"), receipt=RECEIPT, attachments={"config.json": data})
    told = [
        PartTold(change="began", part=PART),
        PartTold(change="kept", part=PART, kept=kept),
        PartTold(change="ended", part=PART),
    ]
    stream = b"".join(map(encode, told))
    lines, found = Lines(), []
    for cut in cuts:
        found += lines.take(stream[:cut])
        stream = stream[cut:]
    assert found + lines.take(stream) == told


def test_a_line_that_is_cut_off_is_not_given() -> None:
    line = encode(PartTold(change="began", part=PART))
    assert Lines().take(line[:-1]) == []


def test_what_is_no_message_is_refused() -> None:
    with pytest.raises(ValueError, match="validation error"):
        Lines().take(b'{"change": "lost"}\n')
