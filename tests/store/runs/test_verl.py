"""verl's checkpoints in a bucket, on a real S3 server: by its engines, and by its trainer."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from trainsync.api.protocol import SaveKind
from trainsync.storage.objects import commits

from tests.distributed.ranks import run_ranks, values_of
from tests.distributed.verl.scenarios import in_bucket
from tests.store.conftest import Place
from tests.unit.cli.commands import findings

pytest.importorskip("verl", reason="the extra `verl` is not installed")
pytestmark = pytest.mark.timeout(400)
CHECKPOINT, STATE_DICT = SaveKind.CHECKPOINT, SaveKind.STATE_DICT


def test_verl_saves_into_a_bucket_and_goes_on_from_it_to_the_last_bit(
    place: Place, tmp_path: Path
) -> None:
    pytest.importorskip("transfer_queue", reason="verl's trainer imports it")
    environ = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    files = place.files / "runs/a"
    url = f"{place.url()}/fsdp2"

    survivor, victim = run_ranks(in_bucket.life, place.url(), environ, tmp_path, files, seconds=200)
    assert survivor.error is None, survivor.error
    assert victim.exit_code == -signal.SIGKILL, victim.error
    ranks = survivor.value["ranks"]
    for rank in ranks:
        for name in ("fsdp2", "fsdp1"):
            seen = rank[name]
            assert seen["loaded"] == seen["at 2"]
            assert seen["loaded loss"] == seen["loss"]
            assert seen["loaded at 3"] == seen["at 3"]
        assert_refused(rank["refused"])
        assert rank["untouched"]
    assert_told(ranks)

    # Of the rank that was killed, and of the save that failed, nothing is committed.
    assert "step 5 was not committed within" in survivor.value["survivor"]
    for prefix, steps in (("fsdp1", [1, 2]), ("fsdp2", [1, 2, 5])):
        bucket = place.open(f"runs/a/{prefix}")
        for kind in SaveKind:
            assert commits.committed_steps(bucket, kind) == steps
    assert_layout(place)

    given = (url, environ, tmp_path)
    (one,) = values_of(run_ranks(in_bucket.trains, *given, world_size=1, seconds=180))
    assert one["step"] == 2, "step 5 was set aside"
    assert one["whole"] == ranks[0]["fsdp2"]["whole"]
    assert one["told"] == [f"{url}/global_step_3"]
    assert "does not save through the run" in one["by itself"][1]
    assert {code for _, code, _ in findings("verify", url, code=0)} <= {"unlisted"}

    (again,) = values_of(
        run_ranks(in_bucket.resumes, *given, files / "fsdp2", world_size=1, seconds=180)
    )
    for what in ("at", "next", "directory", "left"):
        assert again[what] == one[what]
    assert (again["directory"], again["left"]) == (url, [])
    assert again["by path"] == (2, one["whole"])
    assert f"expected {url}/global_step_N" in again["other path"][1]
    assert f"'checkpoints'; expected '{url}'" in again["other directory"][1]
    assert again["other data"][0] == "DataMismatchError"
    kind, text = again["damaged"]
    assert kind == "CorruptCheckpointError"
    assert "data.pt has digest" in text
    assert "the run's monitor was told" in text


def assert_refused(seen: dict[str, tuple[str, str]]) -> None:
    for what, error, text in (
        ("hdfs", "ValueError", "hdfs_path is 'hdfs://x'; expected None"),
        ("elsewhere", "ValueError", "/elsewhere/global_step_3/actor is not a place of this run"),
        ("step", "ValueError", "is of step 3, but global_step is 4"),
        ("other bucket", "ValueError", "is not a place of this run, which is in s3://"),
        ("not committed", "CorruptCheckpointError", "checkpoint 7 is not committed in s3://"),
    ):
        kind, message = seen[what]
        assert kind == error
        assert text in message
        assert "\n" not in message


def assert_told(ranks: list[dict[str, Any]]) -> None:
    """Both ranks heard of the failed upload, and of the flipped byte."""
    first, second = ranks
    assert first["aborted"][0] == "SaveAbortedError"
    assert second["aborted"][0] == "SaveFailedError"
    assert all("the upload failed" in rank["aborted"][1] for rank in ranks)
    assert first["flipped"][0] == "PeerFailedError"
    assert second["flipped"][0] == "CorruptCheckpointError"
    assert "optim_world_size_2_rank_1.pt" in second["flipped"][1]
    assert "the run's monitor was told" in second["flipped"][1]


def assert_layout(place: Place) -> None:
    """The names are verl's; the weights of a checkpoint are its step's state dict."""
    for prefix, more in (("fsdp2", 0), ("fsdp1", 1)):
        bucket = place.open(f"runs/a/{prefix}")
        whole = commits.read_manifest(bucket, CHECKPOINT, 2)
        weights = commits.read_manifest(bucket, STATE_DICT, 2)
        assert weights.keys.items() <= whole.keys.items()
        parts = ("model", "optim", "extra_state")
        shards = {f"actor/{part}_world_size_2_rank_{rank}.pt" for part in parts for rank in (0, 1)}
        small = {"actor/fsdp_config.json", "actor/huggingface/config.json"}
        assert shards | small <= whole.keys.keys()
        exported = [path for path in whole.keys if path.endswith(".safetensors")]
        assert len(exported) == more
