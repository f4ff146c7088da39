"""What a rank tells the process that outlives it comes through whole, however it is cut."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trainsync.api.protocol import SaveKind
from trainsync.checkpoint.rescue.messages import KeptPart, PartKey, PartTold, decode, encode
from trainsync.checkpoint.rescue.process import Lines, unfinished_at_death
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
    assert list(map(decode, found + lines.take(stream))) == told


def test_a_line_that_is_cut_off_is_not_given() -> None:
    line = encode(PartTold(change="began", part=PART))
    assert Lines().take(line[:-1]) == []


def test_what_is_no_message_is_refused() -> None:
    with pytest.raises(ValueError, match="validation error"):
        decode(b'{"change": "lost"}')


def listened(*messages: PartTold) -> list[PartTold]:
    """What is unfinished of a process that has died, by what it said."""
    ours, theirs = socket.socketpair()
    process = subprocess.Popen(["sleep", "60"])
    pidfd = os.pidfd_open(process.pid)
    try:
        for message in messages:
            ours.sendall(encode(message))
        process.kill()
        process.wait()
        return [decode(line) for line in unfinished_at_death(theirs, pidfd)]
    finally:
        os.close(pidfd)
        ours.close()
        theirs.close()


def test_of_a_dead_process_the_last_word_of_each_part_that_has_not_ended_counts() -> None:
    kept = KeptPart(file=Path("/shm/a"), receipt=RECEIPT, attachments={})
    other = PartKey(SaveKind.CHECKPOINT, 8, Participant("model", 3))
    began = [PartTold(change="began", part=part) for part in (PART, other)]
    whole = PartTold(change="kept", part=PART, kept=kept)
    assert listened(*began, whole) == [whole, began[1]]
    assert listened(*began, whole, PartTold(change="ended", part=PART)) == [began[1]]


def test_a_process_that_closes_with_nothing_unfinished_is_not_waited_for() -> None:
    ours, theirs = socket.socketpair()
    ours.sendall(encode(PartTold(change="began", part=PART)))
    ours.sendall(encode(PartTold(change="ended", part=PART)))
    ours.close()
    pidfd = os.pidfd_open(os.getpid())
    try:
        assert unfinished_at_death(theirs, pidfd) == []
    finally:
        os.close(pidfd)
        theirs.close()


def test_what_listens_imports_the_standard_library_alone() -> None:
    code = (
        "import sys, trainsync.checkpoint.rescue.process as p; "
        "print([m for m in sys.modules if m.partition('.')[0] in ('torch', 'pydantic')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
