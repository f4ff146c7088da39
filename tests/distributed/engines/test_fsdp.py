"""`fsdp_save_state_dict` with a real FSDP2 model of transformers on two gloo ranks."""

import asyncio
import json
import logging
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.tensor
from torch.distributed.fsdp import fully_shard
from trainsync import RunContext, all_ranks, fsdp_save_state_dict
from trainsync.api.protocol import SaveKind
from trainsync.checkpoint.load.whole_weights import whole_weights
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves.manifest import check_manifest, read_manifest
from trainsync.storage.saves.pointers import read_pointer
from trainsync.weights.proof.asking import Prover, ask
from trainsync.weights.proof.canaries import make_canaries
from trainsync.weights.proof.comparing import Proven, compare
from trainsync.weights.proof.record import Tolerance, read_proof

from tests.distributed.ranks import run_ranks, values_of

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(180)]

CANARIES = make_canaries(33, count=4, length=6)


def small_qwen2() -> torch.nn.Module:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=33,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    )
    return Qwen2ForCausalLM(config)


def save(directory: Path) -> None:
    dist.init_process_group("gloo")
    context = RunContext.from_env(directory)
    coordinator = context.coordinator()
    model = small_qwen2()
    fully_shard(model)
    limits = Tolerance(typical=0.1, rms=0.1, largest=0.1)
    proof = Prover(CANARIES, limits).ask(model, 8)
    assert all(isinstance(p, torch.distributed.tensor.DTensor) for p in model.parameters())
    fsdp_save_state_dict(
        SimpleNamespace(module=model),
        directory / "global_step_8" / "actor",
        8,
        coordinator,
        logging.getLogger("test"),
        proof=proof,
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()  # the next optimizer step, at once
    coordinator.wait_all(60)
    if dist.get_rank() == 0:
        status = asyncio.run(
            coordinator.register_and_monitor(
                8,
                is_state_dict=True,
                state_dict_participants=all_ranks("model", world_size=2),
                timeout=60,
            )
        )
        assert status.kind is SaveKind.STATE_DICT
    dist.barrier()
    context.close()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("run")
    values_of(run_ranks(save, directory))
    return directory


def test_a_state_dict_is_committed_with_what_verls_merger_needs(saved: Path) -> None:
    run = RunDirectory(saved)
    manifest = read_manifest(run, SaveKind.STATE_DICT, 8).manifest
    check_manifest(run, manifest, with_digest=True)
    assert [entry.path for entry in manifest.files] == [
        "actor/PROOF.json",
        "actor/fsdp_config.json",
        "actor/huggingface/config.json",
        "actor/huggingface/generation_config.json",
        "actor/model_world_size_2_rank_0.pt",
        "actor/model_world_size_2_rank_1.pt",
    ]
    assert read_pointer(run, SaveKind.STATE_DICT) == 8
    assert read_pointer(run, SaveKind.CHECKPOINT) is None
    actor = saved / "global_step_8/actor"
    assert json.loads((actor / "fsdp_config.json").read_text()) == {
        "FSDP_version": 2,
        "world_size": 2,
    }
    config = json.loads((actor / "huggingface/config.json").read_text())
    assert config["architectures"] == ["Qwen2ForCausalLM"]
    assert config["hidden_size"] == 16


def test_the_proof_is_of_the_weights_that_a_reader_puts_together(saved: Path) -> None:
    step = saved / "global_step_8"
    manifest = read_manifest(RunDirectory(saved), SaveKind.STATE_DICT, 8).manifest
    proof = read_proof(step, manifest)
    assert proof is not None
    model = small_qwen2()
    torch.nn.init.zeros_(model.get_input_embeddings().weight)
    model.load_state_dict(whole_weights(step, manifest, deadline=time.monotonic() + 60))
    assert isinstance(compare(proof, ask(model, CANARIES)), Proven)


def test_the_shards_hold_the_weights_as_they_were_when_saving(saved: Path) -> None:
    shards = [
        torch.load(
            saved / f"global_step_8/actor/model_world_size_2_rank_{rank}.pt", weights_only=True
        )
        for rank in range(2)
    ]
    expected = small_qwen2().state_dict()
    assert list(shards[0]) == list(expected)
    for name, tensor in expected.items():
        assert shards[0][name].shape == tensor.shape  # a DTensor, which knows the full shape
        full = torch.cat([shard[name].to_local() for shard in shards])
        assert torch.equal(full, tensor), name
    tied = shards[0]
    assert (
        tied["lm_head.weight"].to_local().data_ptr()
        == tied["model.embed_tokens.weight"].to_local().data_ptr()
    )
