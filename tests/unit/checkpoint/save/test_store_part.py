"""Files of a part that goes straight into a store, and the digests beside them."""

import os
from pathlib import Path

import pytest
import torch
from trainsync.api.protocol import SaveKind
from trainsync.checkpoint.save.places.store import StorePart, StorePlace
from trainsync.storage.block_digests import BLOCK, beside, decode
from trainsync.storage.errors import UnsafePathError
from trainsync.storage.saves.receipts import Participant

from tests.unit.storage.objects.memory import memory


@pytest.fixture
def part() -> StorePart:
    place = StorePlace(memory(), 0, "a" * 8)
    return place.part(SaveKind.CHECKPOINT, 5, Participant("actor", 0))


def test_a_file_of_several_blocks_has_their_digests_beside_it(part: StorePart) -> None:
    state = {"w": torch.rand(BLOCK)}
    file, digests = part.write_state("actor/model.pt", state, state["w"].nbytes, None)
    assert (file.path, digests.path) == ("actor/model.pt", beside("actor/model.pt"))
    small = os.urandom(BLOCK)
    assert [entry.path for entry in part.write_small({"actor/small": small})] == ["actor/small"]
    bucket = part._bucket
    stored = {info.key.partition("actor/")[2]: info.key for info in bucket.below("objects")}
    data = bucket.get(stored["model.pt"]).data
    blocks = decode(bucket.get(stored[beside("model.pt")]).data, file.bytes)
    assert blocks is not None
    assert len(data) == file.bytes
    for number, start in enumerate(range(0, len(data), BLOCK)):
        assert blocks.match(number, memoryview(data)[start : start + BLOCK])


def test_a_file_with_the_name_of_digests_is_refused(part: StorePart) -> None:
    def save_fn(directory: Path) -> None:
        (directory / "mine.xxh3-blocks").write_bytes(b"x")

    part.produce(save_fn)
    with pytest.raises(UnsafePathError, match=r"'actor/mine\.xxh3-blocks' is refused"):
        part.adopt(lambda path: f"actor/{path}")
    part.clear()
