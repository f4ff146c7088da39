"""The weights of a committed step for an inference engine: complete, verified, in time."""

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from trainsync.api.protocol import SaveKind
from trainsync.checkpoint.errors import (
    CheckpointError,
    CorruptCheckpointError,
    LoadTimeoutError,
    MergeError,
    StateMismatchError,
)
from trainsync.checkpoint.load.reshard.plan import Layout, Split
from trainsync.checkpoint.load.whole_weights import whole_weights
from trainsync.storage.digest import file_digest
from trainsync.storage.saves.manifest import Manifest
from trainsync.storage.saves.receipts import FileEntry, Participant

from tests.unit.checkpoint.sharded import arange, save, sharded

SHAPES = {"embed.weight": (5, 3), "norm.weight": (7,), "scale": ()}
SHARD = Path("actor/model_world_size_3_rank_1.pt")


def full() -> dict[str, torch.Tensor]:
    return {name: arange(shape, torch.bfloat16) for name, shape in SHAPES.items()}


def states(ranks: int = 3) -> dict[int, dict[str, Any]]:
    """Sharded over ``ranks``, of unequal size; every rank has a scalar, and one entry is no
    tensor."""
    cut: dict[int, dict[str, Any]] = {rank: {"norm._extra_state": None} for rank in range(ranks)}
    for name, tensor in full().items():
        splits = (Split(0),) if tensor.dim() else (None,)
        layout = Layout(tuple(tensor.shape), (ranks,), tuple(range(ranks)), splits)
        for rank, part in sharded(tensor, layout).items():
            cut[rank][name] = part
    return cut


def manifest(directory: Path) -> Manifest:
    return Manifest(
        kind=SaveKind.STATE_DICT,
        step=7,
        attempt=0,
        incarnation="aaaaaaaa0",
        run_uid="local",
        created_at=datetime(2026, 1, 1, tzinfo=UTC),
        participants=(Participant("model", 0),),
        files=tuple(
            FileEntry(str(path.relative_to(directory)), path.stat().st_size, file_digest(path))
            for path in sorted(directory.rglob("*"))
            if path.is_file()
        ),
    )


def soon() -> float:
    return time.monotonic() + 60


@pytest.fixture
def step(tmp_path: Path) -> Path:
    save(tmp_path, "model", states(), 3)
    (tmp_path / "actor" / "fsdp_config.json").write_text("{}")
    return tmp_path


def test_shards_become_whole_tensors_that_outlive_their_files(step: Path) -> None:
    found = whole_weights(step, manifest(step), deadline=soon())
    for path in (step / "actor").iterdir():
        path.write_bytes(b"")
    assert list(found) == list(SHAPES)
    for name, tensor in full().items():
        assert found[name].dtype == torch.bfloat16
        assert torch.equal(found[name], tensor), name


def test_a_plain_state_of_one_rank_is_taken_as_it_is(tmp_path: Path) -> None:
    save(tmp_path, "model", {0: full()}, 1)
    found = whole_weights(tmp_path, manifest(tmp_path), deadline=soon())
    assert all(torch.equal(found[name], tensor) for name, tensor in full().items())


@pytest.mark.parametrize("at", [100, -100])
def test_a_flipped_bit_anywhere_refuses_the_step(step: Path, at: int) -> None:
    committed = manifest(step)
    data = bytearray((step / SHARD).read_bytes())
    data[at] ^= 1
    (step / SHARD).write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match=f"state_dict 7: {SHARD} has digest"):
        whole_weights(step, committed, deadline=soon())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_file_cut_short_or_gone_is_named(step: Path, rank: int) -> None:
    committed = manifest(step)
    path = step / "actor" / f"model_world_size_3_rank_{rank}.pt"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptCheckpointError, match=f"{path.name} has .* bytes, expected"):
        whole_weights(step, committed, deadline=soon())
    path.unlink()
    with pytest.raises(CheckpointError, match=f"{path.name}"):
        whole_weights(step, committed, deadline=soon())


def test_a_file_that_is_code_is_not_run(step: Path, tmp_path: Path) -> None:
    torch.save({"w": Path("/")}, step / "actor" / "model_world_size_3_rank_0.pt")
    with pytest.raises(CorruptCheckpointError, match="cannot be read"):
        whole_weights(step, manifest(step), deadline=soon())


def test_what_is_not_the_weights_of_one_model_is_refused(step: Path) -> None:
    (step / "critic").mkdir()
    shard = step / SHARD
    (step / "critic" / shard.name).write_bytes(shard.read_bytes())
    with pytest.raises(StateMismatchError, match=r"2 models .*actor, critic"):
        whole_weights(step, manifest(step), deadline=soon())
    for path in step.rglob("*.pt"):
        path.unlink()
    with pytest.raises(StateMismatchError, match=r"0 models .*fsdp_config"):
        whole_weights(step, manifest(step), deadline=soon())
    save(step, "model", {0: {"lr": 0.1}}, 1)
    with pytest.raises(MergeError, match="lr is a float"):
        whole_weights(step, manifest(step), deadline=soon())


def test_a_rank_whose_file_was_never_saved_is_named(step: Path) -> None:
    (step / SHARD).unlink()
    with pytest.raises(CorruptCheckpointError, match=f"no {SHARD}"):
        whole_weights(step, manifest(step), deadline=soon())


def test_reading_ends_at_its_deadline(step: Path) -> None:
    with pytest.raises(LoadTimeoutError, match="state_dict 7 could not be read in time"):
        whole_weights(step, manifest(step), deadline=time.monotonic() - 1)
