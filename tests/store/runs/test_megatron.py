"""Checkpoints of Megatron in a bucket, on a real S3 server, by Megatron's own ranks on CPUs."""

import os
from pathlib import Path
from typing import Any

import pytest
from trainsync.api.protocol import SaveKind
from trainsync.storage.objects import commits

from tests.distributed.engines import megatron_verl_bucket, megatron_whole
from tests.distributed.ranks import run_ranks, values_of
from tests.store.conftest import Place

pytest.importorskip("megatron.core")
pytest.importorskip("verl")
pytestmark = pytest.mark.timeout(400)
CHECKPOINT = SaveKind.CHECKPOINT
PARTS = ("model", "optim", "extra_state")
OPTIM = "actor/optim_world_size_1_rank_0.pt"
NOTE = b"from the attachments"


def test_any_layout_goes_on_from_the_bucket_to_the_last_bit_and_damage_sends_it_to_an_older_step(
    place: Place, tmp_path: Path
) -> None:
    environ = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    model = tmp_path / "hf"

    def ranks(function: Any, *more: Any, world_size: int = 2) -> list[dict[str, Any]]:
        given = (place.url(), environ, model, *more)
        return values_of(run_ranks(function, *given, world_size=world_size, seconds=180))

    first = ranks(megatron_whole.save_and_reshape)
    for seen in first:
        assert seen["resumed"] == seen["went on"]
        assert seen["loaded optimizer"] == seen["optimizer"]
        assert seen["weights alone"] == seen["data parallel"] == seen["saved"]
    assert first[0]["went on"]["numbers"] != first[1]["went on"]["numbers"]

    stored = commits.read_manifest(place.open(), CHECKPOINT, 1)
    shards = {f"actor/{part}_world_size_2_rank_{rank}.pt" for part in PARTS for rank in (0, 1)}
    files = {entry.path for entry in stored.manifest.files}
    assert {path for path in files if path.endswith(".pt")} == shards
    assert (place.files / "runs/a" / stored.keys["actor/note.txt"]).read_bytes() == NOTE

    (alone,) = ranks(megatron_whole.on_one_rank, world_size=1)
    assert alone["saved"] == first[0]["saved"]

    keys = commits.read_manifest(place.open(), CHECKPOINT, 3).keys
    place.proxy.sent.clear()
    last = ranks(megatron_whole.go_on, place.files / "runs/a" / keys[OPTIM])
    for seen, before in zip(last, first, strict=True):
        for what in ("weights", "rate"):
            assert seen["resumed"][what] == before["went on"][what]
        assert seen["optimizer"] == seen["from the older"] == before["optimizer"]
        assert seen["unchanged"]
        assert seen["older"] == 2
    assert any("CorruptCheckpointError" in seen["told"] for seen in last)
    assert all(OPTIM.removeprefix("actor/") in seen["told"] for seen in last)


def test_verls_engine_goes_on_from_the_bucket_and_damage_reaches_both_ranks(
    place: Place, tmp_path: Path
) -> None:
    environ = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    given = (place.url(), environ, tmp_path / "hf", place.files / "runs/a")
    for seen in values_of(run_ranks(megatron_verl_bucket.by_verl, *given, seconds=240)):
        assert seen["resumed"] == seen["went on"]
        assert seen["data parallel"] == seen["saved"]
        assert "hf_model among save_contents is written by Megatron's engine" in seen["export"]
        assert OPTIM.replace("size_1_rank_0", "size_2_rank_1") in seen["damaged"]
        assert seen["unchanged"]
    bucket = place.open()
    weights = commits.read_manifest(bucket, SaveKind.STATE_DICT, 1)
    assert weights.keys.items() <= commits.read_manifest(bucket, CHECKPOINT, 1).keys.items()
    assert commits.committed_steps(bucket, CHECKPOINT) == [1]
