"""Megatron weights, saved, merged, loaded and sent by the real engines on two gloo ranks."""

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from safetensors.torch import load_file
from trainsync import megatron_sync_weight_nccl
from trainsync.api.protocol import SaveKind
from trainsync.checkpoint.load.reshard.files import MappedShards
from trainsync.checkpoint.load.reshard.shard_files import find_component
from trainsync.checkpoint.load.whole_weights import whole_weights
from trainsync.checkpoint.megatron_shards import MegatronShards
from trainsync.checkpoint.merge.merge import merge_to_hf
from trainsync.engines.errors import GatherFailedError, TrainerRankFailedError
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves.manifest import check_manifest, read_manifest
from trainsync.storage.saves.pointers import read_pointer
from trainsync.weights.transports.broadcast.deadlines import Deadlines

from tests.distributed.engines import megatron_job, megatron_whole
from tests.distributed.engines.fsdp_models import Content, content
from tests.distributed.engines.test_broadcast import group
from tests.distributed.ranks import run_ranks, values_of
from tests.distributed.verl.verl_version import VERL_0_8
from tests.distributed.weights.broadcast.broadcast_job import Process, explorer

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def verl(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    directory = tmp_path_factory.mktemp("verl")
    return directory / "run", values_of(run_ranks(megatron_job.verl_engine, directory, seconds=240))


def merged(
    run: Path, step: int, output: Path, kind: SaveKind = SaveKind.STATE_DICT
) -> dict[str, Content]:
    from transformers import AutoModelForCausalLM

    merge_to_hf(run, step, output, kind=kind)
    model = AutoModelForCausalLM.from_pretrained(str(output), dtype="auto")
    return {name: content(tensor) for name, tensor in model.state_dict().items()}


def test_what_verls_engine_held_is_merged_to_the_last_bit(
    verl: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    run, (first, second) = verl
    assert first["committed"] == ""
    assert first["zeroed"]
    assert first["before"] == second["before"]
    assert merged(run, 1, tmp_path / "merged") == first["before"]
    manifest = read_manifest(RunDirectory(run), SaveKind.STATE_DICT, 1).manifest
    served = whole_weights(run / "global_step_1", manifest, deadline=time.monotonic() + 60)
    assert {name: content(tensor) for name, tensor in served.items()} == first["before"]


def test_receipts_say_where_each_rank_stands(verl: tuple[Path, list[dict[str, Any]]]) -> None:
    _, ranks = verl
    for number, rank in enumerate(ranks):
        assert rank["receipts"] == [{"tp": number, "pp": 0, "ep": 0, "cp": 0, "dp": 0}]


def test_saved_weights_are_loaded_again(verl: tuple[Path, list[dict[str, Any]]]) -> None:
    _, (first, second) = verl
    assert first["loaded"] == second["loaded"] == first["before"]


def test_an_engine_that_writes_for_itself_is_restricted_to_the_model_and_committed(
    verl: tuple[Path, list[dict[str, Any]]],
) -> None:
    run, ranks = verl
    for rank in ranks:
        assert rank["by the engine"] == {
            "committed": "",
            "contents": ["model", "extra"],
            "asynchronous": True,
            "remembered": [],
        }
    manifest = read_manifest(RunDirectory(run), SaveKind.STATE_DICT, 2).manifest
    paths = [entry.path for entry in manifest.files]
    folder = "actor" if VERL_0_8 else "actor/model"
    assert f"{folder}/huggingface/model.safetensors" in paths
    assert not any("extra" in path or "optimizer" in path for path in paths)


def test_a_save_that_fails_on_one_rank_is_aborted_and_the_settings_come_back(
    verl: tuple[Path, list[dict[str, Any]]],
) -> None:
    run, ranks = verl
    for rank in ranks:
        assert rank["broken"]["within"] == [["model"]]
        assert rank["broken"]["written before"] == [False], (
            "a full disk would keep the others waiting"
        )
        assert rank["broken"]["contents"] == ["model", "extra"]
    assert "the disk is on fire" in ranks[1]["broken"]["raised"]
    assert "the disk is on fire" in ranks[0]["broken"]["committed"]
    assert read_pointer(RunDirectory(run), SaveKind.STATE_DICT) == 2
    assert not (run / "global_step_3").exists()


def test_a_verl_run_saves_and_resumes_all_it_trains_with_by_configuration_alone(
    verl: tuple[Path, list[dict[str, Any]]],
) -> None:
    run, ranks = verl
    first, second = (rank["hooked"] for rank in ranks)
    for seen in (first, second):
        assert seen["committed"], "the last save returned before it was committed"
        assert seen["resumed"] == seen["went on"], "it did not go on as if nothing had been"
        assert seen["weights alone"]["weights"] != seen["went on"]["weights"], (
            "the optimizer's state makes no difference, so nothing is known of it"
        )
    assert first["went on"]["numbers"] != second["went on"]["numbers"]
    hooked = RunDirectory(run.parent / "hooked")
    manifest = read_manifest(hooked, SaveKind.CHECKPOINT, 1).manifest
    check_manifest(hooked, manifest, with_digest=True)
    parts = ("model", "optim", "extra_state")
    assert {entry.path for entry in manifest.files} >= {
        f"actor/{part}_world_size_2_rank_{rank}.pt" for part in parts for rank in (0, 1)
    }
    assert not any("dist_ckpt" in entry.path for entry in manifest.files), "the engine wrote"


def global_state(run: RunDirectory, step: int) -> tuple[dict[str, Content], Any]:
    """The optimizer's whole tensors, each layer's by itself, and its groups and schedule."""
    files = read_manifest(run, SaveKind.CHECKPOINT, step).manifest.files
    component = find_component(files, "optim", "actor")
    assert component is not None
    shards = MegatronShards(MappedShards(run.step(step).joinpath).open, component)
    found = {
        f"{key}{list(index)}": content(shards.whole(key, index))
        for key, tensor in shards.tensors.items()
        for index in np.ndindex(*tensor.shape[: tensor.leading])
    }
    return found, (shards.beside[0]["groups"], shards.beside[0]["schedule"])


def test_the_optimizer_goes_through_other_layouts_and_back_to_the_last_bit(
    verl: tuple[Path, list[dict[str, Any]]],
) -> None:
    """Step 1 is saved by two tensor parallel ranks, 2 by two data parallel ones, 3 as step 1."""
    run, ranks = verl
    hooked = RunDirectory(run.parent / "hooked")
    saved = {step: global_state(hooked, step) for step in (1, 2, 3)}
    tensors, (groups, schedule) = saved[1]
    kinds = {key.split(".")[2] for key in tensors}
    assert kinds == {"fp32_param", "exp_avg", "exp_avg_sq"}
    assert {group["step"] for group in groups} == {1.0}
    assert schedule["num_steps"] == 1
    for step in (2, 3):
        assert saved[step][0] == tensors
        assert saved[step][1] == (groups, schedule)
    for rank in ranks:
        seen = rank["hooked"]
        for what in ("weights", "rate"):
            assert seen["reshaped"][what] == seen["went on"][what]


def test_what_the_engine_wrote_for_itself_is_resumed_in_its_layout_and_refused_in_others(
    verl: tuple[Path, list[dict[str, Any]]],
) -> None:
    run, ranks = verl
    hooked = RunDirectory(run.parent / "hooked")
    paths = {entry.path for entry in read_manifest(hooked, SaveKind.CHECKPOINT, 5).manifest.files}
    folder = "" if VERL_0_8 else "optimizer/"
    assert f"actor/{folder}dist_ckpt/metadata.json" in paths
    for rank in ranks:
        seen = rank["hooked"]["by the engine"]
        assert seen["resumed"] == seen["went on"]
        assert "tp=2 pp=1 ep=1 cp=1 dp=1" in seen["other layout"]
        assert "tp=1 pp=1 ep=1 cp=1 dp=2" in seen["other layout"]


def test_a_checkpoint_in_which_the_engine_fails_is_aborted_and_every_rank_hears_of_it(
    verl: tuple[Path, list[dict[str, Any]]],
) -> None:
    run, ranks = verl
    for rank in ranks:
        broken = rank["hooked"]["broken"]
        assert broken["within"] == [["hf_model"]]
        assert broken["after"], "the settings of the engine's manager did not come back"
        assert rank["hooked"]["pointer"] == 5
    for rank in ranks:
        assert "the disk is on fire" in rank["hooked"]["broken"]["told"]
    assert not RunDirectory(run.parent / "hooked").manifest(SaveKind.CHECKPOINT, 4).exists()


def test_actor_and_critic_are_saved_in_one_commit_and_both_go_on_from_it(
    verl: tuple[Path, list[dict[str, Any]]],
) -> None:
    run, ranks = verl
    manifest = read_manifest(RunDirectory(run.parent / "hooked"), SaveKind.CHECKPOINT, 6).manifest
    parts = ("model", "optim", "extra_state")
    assert {entry.path for entry in manifest.files} >= {
        f"{model}/{part}_world_size_2_rank_{rank}.pt"
        for model in ("actor", "critic")
        for part in parts
        for rank in (0, 1)
    }
    components = {participant.component for participant in manifest.participants}
    assert components >= {"critic_model", "critic_optim", "optim", "extra_state"}
    for rank in ranks:
        seen = rank["hooked"]["critic"]
        assert seen["pointer"] == 6
        assert seen["resumed"] == seen["went on"]
        assert any("output_layer" in name for name in seen["resumed"]["critic"]["weights"])


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    directory = tmp_path_factory.mktemp("layouts")
    return directory, values_of(run_ranks(megatron_job.layouts, directory, seconds=200))


def test_pipeline_stages_are_merged_to_the_last_bit(
    layouts: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    directory, (first, second) = layouts
    assert first["pipeline"] == ""
    assert first["before"] == second["before"]
    assert merged(directory / "run", 1, tmp_path / "merged") == first["before"]


def test_of_copies_each_data_parallel_rank_writes_a_share(
    layouts: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    directory, (first, _) = layouts
    assert first["copies"] == ""
    shards = sorted((directory / "run" / "global_step_2" / "actor").glob("model_world_size_*.pt"))
    small, large = sorted(path.stat().st_size for path in shards)
    assert large < 2 * small, "one rank wrote more than its share"
    assert merged(directory / "run", 2, tmp_path / "merged") == first["before"]


def test_another_parallel_layout_loads_the_same_weights(
    layouts: tuple[Path, list[dict[str, Any]]],
) -> None:
    for rank in layouts[1]:
        assert rank["loaded 1"] == rank["loaded 2"] == rank["before"]


def test_another_model_is_refused_and_both_layouts_are_named(
    layouts: tuple[Path, list[dict[str, Any]]],
) -> None:
    for rank in layouts[1]:
        assert "tp=1 pp=2 ep=1 cp=1 dp=1" in rank["refused"]
        assert "tp=2 pp=1 ep=1 cp=1 dp=1" in rank["refused"]
        assert "expected the same model" in rank["refused"]


@pytest.fixture(scope="module")
def experts(layouts: tuple[Path, list[dict[str, Any]]]) -> tuple[Path, list[dict[str, Any]]]:
    directory, ranks = layouts
    return directory / "experts", [rank["experts"] for rank in ranks]


def test_receipts_name_the_expert_parallel_rank(
    experts: tuple[Path, list[dict[str, Any]]],
) -> None:
    for number, rank in enumerate(experts[1]):
        alone = {"tp": 0, "pp": 0, "ep": number, "cp": 0, "dp": number}
        assert rank["receipts"] == [
            alone,
            alone,
            alone | {"ep": 0},  # only data parallel
            alone | {"tp": number, "ep": 0, "dp": 0},
            alone | {"tp": number, "dp": 0},
            alone,
        ]


def in_files(directory: Path) -> dict[str, Content]:
    """Weights as a Hugging Face directory has them, whatever a model makes of them in memory."""
    return {
        name: content(tensor)
        for path in directory.glob("*.safetensors")
        for name, tensor in load_file(path).items()
    }


def test_experts_of_any_layout_are_merged_to_the_last_bit_and_load_in_transformers(
    experts: tuple[Path, list[dict[str, Any]]], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    directory, (first, second) = experts
    assert first["committed"] == [""] * 6
    assert first["before"] == second["before"] == in_files(directory / "hf")
    for step in range(1, 7):
        output = tmp_path / f"merged {step}"
        merge_to_hf(directory / "run", step, output, kind=SaveKind.STATE_DICT)
        assert in_files(output) == first["before"], f"step {step}"
    model, loaded = AutoModelForCausalLM.from_pretrained(
        str(tmp_path / "merged 1"), dtype="auto", output_loading_info=True
    )
    assert not any(loaded.values()), loaded
    model.save_pretrained(tmp_path / "saved")  # in memory transformers 5 has experts fused
    assert in_files(tmp_path / "saved") == first["before"]


def test_expert_parallel_shards_are_loaded_again_and_by_other_layouts(
    experts: tuple[Path, list[dict[str, Any]]],
) -> None:
    for rank in experts[1]:
        assert rank["zeroed"] == [True] * 4
        for layout, loaded in rank["loaded"].items():
            assert loaded == rank["before"], layout


@pytest.fixture
def explorers(tmp_path: Path) -> Iterator[list[Process]]:
    processes = [Process(explorer, f"e{n}", str(tmp_path), None) for n in range(2)]
    yield processes
    for process in processes:
        process.end()


DEADLINES = Deadlines(whole=15.0, bucket=6.0, connect=6.0, silence=15.0)
KNOWN_SECONDS = DEADLINES.whole + DEADLINES.connect + 10.0


def fail() -> None:
    raise RuntimeError("no such luck")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def broadcast(
    model: Path, directory: Path, fault: Callable[[], None]
) -> tuple[dict[str, Content], str, float]:
    """Version 1 goes well; in the gathers of version 2 rank 1 has a fault."""
    dist.init_process_group("gloo")
    from tests.distributed.engines import megatron_cpu

    engine = megatron_cpu.make_trained(model, tp=2)
    ranks = group(directory, explorers=2, deadlines=DEADLINES)
    megatron_sync_weight_nccl(engine, ranks, 1)
    sent = megatron_job.weights(engine)
    dist.barrier()
    began = time.monotonic()
    try:
        megatron_sync_weight_nccl(megatron_job.Faulty(engine, 1, fault), ranks, 2)
    except (GatherFailedError, TrainerRankFailedError) as error:
        return sent, str(error), time.monotonic() - began
    return sent, "nothing happened", 0.0


@pytest.mark.parametrize("fault", [fail, die])
def test_explorers_get_the_weights_and_a_rank_that_is_lost_in_a_gather_is_known_in_time(
    layouts: tuple[Path, list[dict[str, Any]]],
    tmp_path: Path,
    explorers: list[Process],
    fault: Callable[[], None],
) -> None:
    model = layouts[0] / "hf"
    first, second = run_ranks(broadcast, model, tmp_path, fault, seconds=150)
    for rank in [first, second] if fault is fail else [first]:
        assert rank.error is None, rank.error
        sent, told, seconds = rank.value
        assert seconds < KNOWN_SECONDS, told
        assert "gone" in told or "gather" in told or "no such luck" in told
    for process in explorers:
        assert process.ask("version") == 1
        assert process.ask("tensors") == sent


def test_checkpoints_without_verls_manager_go_on_in_any_layout_to_the_last_bit(
    tmp_path: Path,
) -> None:
    """On a volume; in a bucket: `tests/store/runs/test_megatron.py`."""
    given: tuple[str, dict[str, str], Path] = (str(tmp_path / "run"), {}, tmp_path / "hf")
    ranks = values_of(run_ranks(megatron_whole.save_and_reshape, *given, seconds=200))
    for seen in ranks:
        assert seen["resumed"] == seen["went on"]
        assert seen["loaded optimizer"] == seen["optimizer"]
        assert seen["weights alone"] == seen["data parallel"] == seen["saved"]
    run = tmp_path / "run"
    assert read_pointer(RunDirectory(run), SaveKind.CHECKPOINT) == 2
    whole = merged(run, 2, tmp_path / "merged", SaveKind.CHECKPOINT)
    assert whole == ranks[0]["saved"]
