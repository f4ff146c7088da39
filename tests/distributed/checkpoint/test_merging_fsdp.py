"""What real FSDP2 ranks saved is merged by a process that has never heard of their group."""

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from trainsync import (
    RunContext,
    TrainedModule,
    all_ranks,
    fsdp_save_state_dict,
    huggingface_files,
)
from trainsync.api.protocol import SaveKind
from trainsync.checkpoint.merge.merge import merge_to_hf

from tests.distributed.ranks import run_ranks, values_of

pytestmark = [pytest.mark.distributed, pytest.mark.timeout(120)]

STEP = 3


def small_qwen2(*, tied: bool) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=33,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=None,
    )
    return Qwen2ForCausalLM(config)  # type: ignore[no-untyped-call]


def small_tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {"<unk>": 0, "sheep": 1}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<unk>")), unk_token="<unk>"
    )


def save(directory: Path) -> None:
    dist.init_process_group("gloo")
    for name, tied in (("tied", True), ("untied", False)):
        context = RunContext.from_env(directory / name)
        coordinator = context.coordinator()
        model = small_qwen2(tied=tied)
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        fsdp_save_state_dict(
            TrainedModule(model, small_tokenizer()),
            "actor",
            STEP,
            coordinator,
            logging.getLogger("test"),
        )
        coordinator.wait_all(60)
        if dist.get_rank() == 0:
            everyone = all_ranks("model", world_size=dist.get_world_size())
            asyncio.run(
                coordinator.register_and_monitor(
                    STEP, is_state_dict=True, state_dict_participants=everyone, timeout=60
                )
            )
        dist.barrier()
        context.close()
    with RunContext.from_env(directory / "short") as ctx:
        coordinator = ctx.coordinator()
        for step in (STEP, STEP + 1):
            model = small_qwen2(tied=False)
            for layer in model.model.layers:
                fully_shard(layer)
            fully_shard(model)
            if step > STEP:
                model = torch.compile(model)
            coordinator.save(step, model=model, attachments=huggingface_files(model))
        coordinator.finish(timeout=60)


def test_three_ranks_state_dict_becomes_the_model_with_its_tokenizer_bit_for_bit(
    tmp_path: Path,
) -> None:
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    values_of(run_ranks(save, tmp_path, world_size=3))
    for name, tied in (("tied", True), ("untied", False)):
        output = tmp_path / f"merged-{name}"
        result = merge_to_hf(tmp_path / name, STEP, output, kind=SaveKind.STATE_DICT)
        assert bool(result.tied) is tied
        loaded, info = AutoModelForCausalLM.from_pretrained(output, output_loading_info=True)
        assert not any(info.values()), info
        expected = small_qwen2(tied=tied).state_dict()
        assert list(loaded.state_dict()) == list(expected)
        for key, tensor in loaded.state_dict().items():
            assert torch.equal(tensor, expected[key]), key
        assert PreTrainedTokenizerFast.from_pretrained(str(output)).encode("sheep") == [1]
    # A checkpoint of a script that has nothing but its model: plain, and compiled.
    for step in (STEP, STEP + 1):
        output = tmp_path / f"merged-{step}"
        merge_to_hf(tmp_path / "short", step, output, kind=SaveKind.CHECKPOINT)
        loaded, info = AutoModelForCausalLM.from_pretrained(output, output_loading_info=True)
        assert not any(info.values()), info
        for key, tensor in small_qwen2(tied=False).state_dict().items():
            assert torch.equal(tensor, loaded.state_dict()[key]), key


def test_a_model_without_a_configuration_has_no_files_to_merge_with() -> None:
    with pytest.raises(TypeError, match="Linear has no config of transformers"):
        huggingface_files(torch.nn.Linear(1, 1))
