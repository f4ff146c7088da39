"""`FSDPCheckpointManager` in verl's real FSDP engine, on two gloo ranks."""

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.tensor
from trainsync.api.protocol import SaveKind
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves.manifest import check_manifest, committed_steps, read_manifest
from trainsync.storage.saves.pointers import read_pointer

from tests.distributed.ranks import run_ranks, values_of
from tests.distributed.verl.scenarios import fsdp2_engine, lost_ranks, other_engines
from tests.distributed.verl.verl_version import VERL_0_8

pytest.importorskip("verl", reason="the extra `verl` is not installed")

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(400)]

adapter_alone = pytest.mark.skipif(VERL_0_8, reason="verl 0.8 has no save_lora_only")
merging = pytest.mark.skipif(VERL_0_8, reason="verl 0.8 does not merge")
OTHERS = ["fsdp1", "offload", "overlapped", "lora", pytest.param("adapter", marks=adapter_alone)]
SHARDS = [f"actor/{{}}_world_size_2_rank_{rank}.pt" for rank in range(2)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("verl")


@pytest.fixture(scope="module")
def fsdp2(place: Path, ray_of_ranks: dict[str, Any]) -> list[dict[str, Any]]:
    return values_of(run_ranks(fsdp2_engine.fsdp2, place, ray_of_ranks, seconds=300))


@pytest.fixture(scope="module")
def others(place: Path, ray_of_ranks: dict[str, Any]) -> list[dict[str, Any]]:
    return values_of(run_ranks(other_engines.others, place, ray_of_ranks, seconds=300))


def committed(run: Path, kind: SaveKind, step: int) -> set[str]:
    """Files of a committed save, after every one was compared with its digest."""
    manifest = read_manifest(RunDirectory(run), kind, step).manifest
    check_manifest(RunDirectory(run), manifest, with_digest=True)
    return {entry.path for entry in manifest.files}


def shards(*components: str) -> set[str]:
    return {shard.format(name) for name in components for shard in SHARDS}


# -- FSDP2 ----------------------------------------------------------------------------------------


def test_what_we_committed_is_restored_bit_for_bit_by_verls_own_manager(fsdp2: Any) -> None:
    for rank in fsdp2:
        saved = rank["saved"]
        assert saved["theirs at 2"] == saved["at 2"]
        assert saved["theirs loss"] == saved["loss"]  # the generators are where they were
        assert saved["theirs at 3"] == saved["at 3"]  # and so are optimizer and scheduler


def test_what_we_committed_is_restored_bit_for_bit_by_our_manager(fsdp2: Any) -> None:
    for rank in fsdp2:
        saved = rank["saved"]
        assert saved["ours at 2"] == saved["at 2"]
        assert saved["ours loss"] == saved["loss"]
        assert saved["ours at 3"] == saved["at 3"]


def test_a_checkpoint_has_verls_layout_and_its_weights_are_the_steps_state_dict(
    fsdp2: Any, place: Path
) -> None:
    run = place / "run"
    state_dict = committed(run, SaveKind.STATE_DICT, 2)
    small = {"actor/fsdp_config.json"} | {
        f"actor/huggingface/{name}"
        for name in (
            "config.json",
            "generation_config.json",
            "tokenizer.json",
            "tokenizer_config.json",
        )
    }
    assert state_dict == shards("model") | small
    assert committed(run, SaveKind.CHECKPOINT, 2) == state_dict | shards("optim", "extra_state")
    assert json.loads((run / "global_step_2/actor/fsdp_config.json").read_text()) == {
        "FSDP_version": 2,
        "world_size": 2,
    }
    assert read_pointer(RunDirectory(run), SaveKind.CHECKPOINT) == 2
    assert (run / "global_step_2/data.pt").read_text() == "2"  # verl's trainer's own


def test_every_shard_loads_without_executing_anything(fsdp2: Any, place: Path) -> None:
    for shard in shards("model", "optim", "extra_state"):
        torch.load(place / "run/global_step_2" / shard, weights_only=True)


def test_one_rank_goes_on_from_what_two_committed(fsdp2: Any, place: Path) -> None:
    shutil.copytree(place / "run", place / "alone")
    (result,) = values_of(run_ranks(fsdp2_engine.alone, place, world_size=1, seconds=120))
    for rank in fsdp2:
        assert result["whole"] == rank["saved"]["whole"]  # weights and moments, bit for bit
        assert result["schedule"] == rank["saved"]["schedule"]
    files = committed(place / "alone", SaveKind.CHECKPOINT, 3)
    assert "actor/optim_world_size_1_rank_0.pt" in files


def test_verls_limit_removes_nothing(fsdp2: Any, place: Path) -> None:
    run = RunDirectory(place / "run")
    assert committed_steps(run, SaveKind.CHECKPOINT) == [1, 2]
    assert fsdp2[0]["refusals"]["removal"][0] == "CheckpointError"


def test_what_verl_wrote_elsewhere_is_loaded(fsdp2: Any) -> None:
    for rank in fsdp2:
        assert rank["exchange"]["loaded"] == rank["exchange"]["saved"]


def test_what_is_in_the_run_and_not_committed_is_refused(fsdp2: Any) -> None:
    for rank in fsdp2:
        name, text = rank["exchange"]["inside"]
        assert name == "CorruptCheckpointError"
        assert "MANIFEST.checkpoint.json is missing" in text


def test_a_checkpoint_reuses_the_state_dict_that_was_saved_before(fsdp2: Any, place: Path) -> None:
    run = place / "reuse"
    state_dict = committed(run, SaveKind.STATE_DICT, 1)
    checkpoint = committed(run, SaveKind.CHECKPOINT, 1)
    assert shards("model") <= state_dict < checkpoint
    manifest = read_manifest(RunDirectory(run), SaveKind.CHECKPOINT, 1).manifest
    assert {who.component for who in manifest.participants} == {"optim", "extra_state", "hf_model"}


def test_a_checkpoint_of_the_start_has_its_weights_though_no_state_dict_was_saved(
    fsdp2: Any, place: Path
) -> None:
    assert shards("model") <= committed(place / "start", SaveKind.CHECKPOINT, 0)


def test_the_weights_that_training_starts_from_are_uploaded_and_not_saved(
    fsdp2: Any, place: Path
) -> None:
    assert committed_steps(RunDirectory(place / "reuse"), SaveKind.STATE_DICT) == [1]
    assert [rank["reuse"]["resumed"] for rank in fsdp2] == [0, 0]
    assert [rank["reuse"]["versions"] for rank in fsdp2] == [[0, 1], [0, 1]]


def test_the_export_and_verls_merger_give_the_weights_as_they_were_when_saving(fsdp2: Any) -> None:
    result = fsdp2[0]["reuse"]
    assert result["exported"] == []
    assert result["merged"] == []
    assert result["temperature"] == 0.25
    original, saved = result["vocabularies"]
    assert saved == original
    assert "w3" in saved


@pytest.mark.parametrize(
    ("what", "error", "text"),
    [
        ("hdfs", "ValueError", "hdfs_path is 'hdfs://x'; expected None"),
        ("hdfs load", "ValueError", "hdfs_path is 'hdfs://x'; expected None"),
        ("elsewhere", "ValueError", "/elsewhere/global_step_3/actor is not a place of this run"),
        ("step", "ValueError", "is of step 3, but global_step is 4"),
        ("critic", "ValueError", "is in the folder critic; expected actor"),
        ("synchronizer", "ValueError", "needs the run's Synchronizer"),
        ("engine", "TypeError", "SimpleNamespace has no attribute 'optimizer'"),
        ("nothing there", "CorruptCheckpointError", "is not a committed checkpoint"),
    ],
)
def test_what_is_not_understood_is_refused_on_every_rank(
    fsdp2: Any, what: str, error: str, text: str
) -> None:
    for rank in fsdp2:
        name, message = rank["refusals"][what]
        assert name == error
        assert text in message


def test_a_rank_that_cannot_save_keeps_the_others_from_saving(fsdp2: Any, place: Path) -> None:
    (first, about_other), (second, _) = (rank["refusals"]["one rank"] for rank in fsdp2)
    assert (first, second) == ("PeerFailedError", "ValueError")
    assert "rank 1: ValueError" in about_other
    assert not (place / "refusals/global_step_3").exists()


@pytest.mark.parametrize("what", ["state_dict", "chosen_state", "fsdp_upload_state_dict"])
def test_what_fails_on_one_rank_before_anything_is_staged_fails_on_all(
    fsdp2: Any, what: str
) -> None:
    (first, about_other), (second, _) = (rank["one rank"][what] for rank in fsdp2)
    assert (first, second) == ("PeerFailedError", "MemoryError")
    assert "rank 1: MemoryError: no memory on this rank alone" in about_other


def test_a_save_after_one_that_failed_on_one_rank_is_committed(fsdp2: Any, place: Path) -> None:
    assert [rank["one rank"]["next"][0] for rank in fsdp2] == ["", ""]
    assert committed_steps(RunDirectory(place / "one-rank"), SaveKind.CHECKPOINT) == [3]


def test_a_full_disk_on_one_rank_reaches_every_waiting_or_saving_rank(fsdp2: Any) -> None:
    for outcome in ("waited", "next save"):
        for rank in fsdp2:
            name, text = rank["broken"][outcome]
            assert "No space left on device" in text, (outcome, name)
        assert fsdp2[1]["broken"][outcome][0] == "SaveFailedError"
    assert fsdp2[0]["broken"]["waited"][0] == "SaveAbortedError"


def test_saves_that_met_a_full_disk_are_not_committed_and_later_ones_are(fsdp2: Any) -> None:
    assert [rank["broken"]["after"] for rank in fsdp2] == [("", "nothing was raised")] * 2
    for rank in fsdp2:
        assert rank["broken"]["committed"] == {kind: [1, 5] for kind in SaveKind}


def test_a_flipped_bit_in_one_ranks_file_is_found_before_anything_is_loaded(fsdp2: Any) -> None:
    name, text = fsdp2[1]["broken"]["flipped"]
    assert name == "CorruptCheckpointError"
    assert "optim_world_size_2_rank_1.pt has digest" in text
    assert fsdp2[0]["broken"]["flipped"][0] == "PeerFailedError"
    assert [rank["broken"]["untouched"] for rank in fsdp2] == [True, True]


# -- other engines --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OTHERS)
def test_other_engines_go_on_bit_for_bit_from_what_we_committed(others: Any, name: str) -> None:
    for rank in others:
        result = rank[name]
        for who in ("theirs", "ours"):
            assert result[f"{who} loaded"] == result["saved"], who
            assert result[f"{who} loss"] == result["loss"], who


@pytest.mark.parametrize("name", OTHERS)
def test_the_whole_model_of_other_engines_is_exported(others: Any, name: str) -> None:
    assert others[0][name]["exported"] == []


def test_state_dicts_of_every_kind_of_engine_are_read_by_verls_own_manager(
    others: Any, place: Path
) -> None:
    assert [rank["state dicts"] for rank in others] == [[], []]
    lora = committed(place / "state-dicts", SaveKind.STATE_DICT, 3)
    assert {"actor/lora_train_meta.json", "actor/huggingface/tokenizer.json"} < lora


def test_fsdp1_says_so_to_the_merger(others: Any, place: Path) -> None:
    config = (place / "fsdp1/global_step_2/actor/fsdp_config.json").read_text()
    assert json.loads(config)["FSDP_version"] == 1


def test_lora_is_described_for_the_merger(others: Any, place: Path) -> None:
    meta = (place / "lora/global_step_2/actor/lora_train_meta.json").read_text()
    assert json.loads(meta) == {"r": 4, "lora_alpha": 8, "task_type": "CAUSAL_LM"}


@adapter_alone
def test_an_adapter_alone_is_a_part_of_the_checkpoint_and_no_state_dict(
    others: Any, place: Path
) -> None:
    run = place / "adapter"
    assert committed_steps(RunDirectory(run), SaveKind.STATE_DICT) == []
    assert shards("model") < committed(run, SaveKind.CHECKPOINT, 2)
    (shard, _) = sorted(shards("model"))
    names = list(torch.load(run / "global_step_2" / shard, weights_only=True))
    assert names
    assert all("lora_" in name for name in names)


@merging
def test_with_merged_lora_explorers_get_merged_weights_and_checkpoints_go_on(
    others: Any, place: Path
) -> None:
    for rank in others:
        assert rank["merged"]["loaded"] == rank["merged"]["saved"]
    assert others[0]["merged"]["differs"] == []
    assert others[0]["merged"]["taken"] == 2
    assert others[0]["merged"]["taken differs"] == []
    step = place / "merged/global_step_2"
    saved, merged = (
        torch.load(step / folder / Path(SHARDS[0].format("model")).name, weights_only=True)
        for folder in ("actor", "merged")
    )
    assert any("lora_" in name for name in saved)
    assert not any("lora_" in name or "base_layer" in name for name in merged)
    files = committed(place / "merged", SaveKind.STATE_DICT, 2)
    assert "merged/huggingface/config.json" in files
    assert "merged/lora_train_meta.json" not in files


@merging
def test_actor_and_critic_are_one_commit_with_components_of_their_own(
    others: Any, place: Path
) -> None:
    for rank in others:
        result = rank["critic"]
        assert result["committed"], "the last save returned before it was committed"
        assert result["loaded"] == result["saved"]
        assert "explorers take the actor's weights" in result["state dict"][1]
        assert "is in the folder actor; expected critic" in result["folder"][1]
    run = RunDirectory(place / "critic")
    for step in (1, 2):
        files = committed(run.root, SaveKind.CHECKPOINT, step)
        both = shards("model", "optim", "extra_state")
        assert both | {path.replace("actor/", "critic/") for path in both} < files
        manifest = read_manifest(run, SaveKind.CHECKPOINT, step).manifest
        components = {participant.component for participant in manifest.participants}
        critic = {"critic_model", "critic_optim", "critic_extra_state"}
        assert components == {"optim", "extra_state"} | critic
        assert not any("critic" in path for path in committed(run.root, SaveKind.STATE_DICT, step))


def test_an_older_attempts_state_dict_gives_way_to_the_newer_ones(others: Any, place: Path) -> None:
    assert [rank["older"]["attempt"] for rank in others] == [1, 1]
    assert [rank["older"]["wait"][0] for rank in others] == ["", ""]
    run = RunDirectory(place / "older")
    # At 5 the weights are the same as before, at 6 they are not.
    assert committed_steps(run, SaveKind.CHECKPOINT) == [5, 6, 7]
    assert read_pointer(run, SaveKind.CHECKPOINT) == 7
    for step in (5, 6, 7):
        committed(run.root, SaveKind.STATE_DICT, step)
        committed(run.root, SaveKind.CHECKPOINT, step)
        assert read_manifest(run, SaveKind.STATE_DICT, step).manifest.attempt == 1


# -- a rank that dies -----------------------------------------------------------------------------


def test_a_rank_killed_in_a_save_leaves_the_checkpoint_before(place: Path) -> None:
    survivor, victim = run_ranks(lost_ranks.killed, place, seconds=120)
    assert victim.exit_code == -signal.SIGKILL, victim.error
    assert survivor.error is None, survivor.error
    assert "step 2 was not committed within" in survivor.value["survivor"]
    run = RunDirectory(place / "killed")
    assert committed_steps(run, SaveKind.CHECKPOINT) == [1]
    assert read_pointer(run, SaveKind.CHECKPOINT) == 1
    resumed = values_of(run_ranks(lost_ranks.resumed, place, seconds=120))
    assert [rank["step"] for rank in resumed] == [1, 1]
    assert resumed[0]["loaded"] == survivor.value["at 1"]
    committed(run.root, SaveKind.CHECKPOINT, 2)
    assert read_pointer(run, SaveKind.CHECKPOINT) == 2
