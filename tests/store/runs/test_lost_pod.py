"""A rank of a run in a bucket is lost with its pod: its part is written from a neighbour's copy."""

import io
import threading
from pathlib import Path

import pytest
import torch
from trainsync import RunContext, all_ranks
from trainsync.api import env
from trainsync.api.protocol import SaveKind
from trainsync.checkpoint.load.loading import load_shard
from trainsync.checkpoint.rescue.copies import offer
from trainsync.checkpoint.rescue.messages import KeptPart, PartKey
from trainsync.checkpoint.save.places.opening import open_place
from trainsync.storage.objects import commits
from trainsync.storage.saves.receipts import FileEntry, Participant, Receipt

from tests.store.conftest import Place
from tests.unit.checkpoint.memory.keeping import digest_of
from tests.unit.cli.commands import findings

CHECKPOINT = SaveKind.CHECKPOINT
SHARD = "actor/model_world_size_2_rank_{}.pt"
LOST = 1


def copy_of(ctx: RunContext, directory: Path, step: int) -> KeptPart:
    """The part of the rank that is lost, as its neighbour has it."""
    data = io.BytesIO()
    torch.save({"weight": torch.full((1000,), step + 0.5)}, data)
    file = directory / f"copy-{step}"
    file.write_bytes(data.getvalue())
    receipt = Receipt(
        kind=CHECKPOINT,
        step=step,
        attempt=ctx.attempt,
        incarnation=ctx.incarnation,
        component="model",
        rank=LOST,
        world_size=2,
        files=(FileEntry(SHARD.format(LOST), file.stat().st_size, digest_of(file.read_bytes())),),
        seconds=0.1,
    )
    return KeptPart(file=file, receipt=receipt, attachments={"actor/config.json": b"{}"})


def test_a_save_of_a_lost_pod_is_committed_from_its_neighbour_s_copy(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(env.CHECKPOINT_MEMORY, "64Mi")
    monkeypatch.setenv(env.CHECKPOINT_MEMORY_DIR, str(tmp_path))
    monkeypatch.setenv(env.CHECKPOINT_MEMORY_COPIES, "1")
    with RunContext.from_env(place.url()) as ctx:
        ctx.resume()
        saving = ctx.coordinator(0, 2)
        part = PartKey(CHECKPOINT, 2, Participant("model", LOST))
        copy = copy_of(ctx, tmp_path, 2)
        saving.register(2, checkpoint_participants=all_ranks("model", world_size=2))
        saving.save_async("model", {"weight": torch.full((1000,), 2.0)}, 2)
        saving.wait_all(60)
        there = open_place(place.url(), ctx.attempt, ctx.incarnation)
        neighbour = threading.Thread(target=offer, args=(there, {part: copy}))
        neighbour.start()
        ctx.restart_in_place("a pod is lost")
        neighbour.join(30)
        assert not neighbour.is_alive()
        resume = ctx.resume()
        assert resume is not None
        assert resume.step == 2
        found = [float(load_shard(resume, SHARD.format(rank))["weight"][0]) for rank in range(2)]
        assert found == [2.0, 2.5]
        assert "actor/config.json" in {entry.path for entry in resume.manifest.files}
    assert commits.committed_steps(place.open(), CHECKPOINT) == [2]
    assert findings("verify", place.url(), code=0) == []
