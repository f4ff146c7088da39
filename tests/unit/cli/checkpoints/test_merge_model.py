"""The whole way: saved by the library, merged by the command, loaded by transformers."""

import asyncio
from pathlib import Path

import pytest
import torch
from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.monitor.client.local import LocalMonitorClient
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

from tests.unit.cli.commands import call, document


@pytest.fixture
def model() -> Qwen2ForCausalLM:
    torch.manual_seed(1)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=32,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            architectures=["Qwen2ForCausalLM"],
        )
    )


@pytest.fixture
def saved(tmp_path: Path, model: Qwen2ForCausalLM) -> Path:
    directory = tmp_path / "run"
    monitor = LocalMonitorClient(directory, attempt=0, incarnation="0123456789abcdef")
    monitor.claim("local")
    coordinator = CheckpointCoordinator(monitor, directory)
    config = model.config.to_json_string().encode()
    coordinator.save_sync(
        "model", model.state_dict(), 5, attachments={"huggingface/config.json": config}
    )
    asyncio.run(
        coordinator.register_and_monitor(5, checkpoint_participants=[("model", 0)], timeout=30)
    )
    monitor.close()
    return directory


def test_a_merged_model_is_the_model(saved: Path, tmp_path: Path, model: Qwen2ForCausalLM) -> None:
    output = tmp_path / "out" / "model"
    found = document("merge", saved, 5, "--output", output)
    assert found["tensors"] == len(model.state_dict())
    loaded = AutoModelForCausalLM.from_pretrained(output)
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
    half = tmp_path / "half"
    assert call("merge", saved, 5, "-o", half, "--dtype", "bfloat16").exit_code == 0
    loaded = AutoModelForCausalLM.from_pretrained(half, dtype="auto")
    assert loaded.dtype is torch.bfloat16
    assert document("ls", saved)["saves"][0]["leases"] == []


def test_a_damaged_shard_is_named_and_nothing_is_left(saved: Path, tmp_path: Path) -> None:
    (shard,) = (saved / "global_step_5/actor").glob("model_*.pt")
    data = bytearray(shard.read_bytes())
    data[-2000] ^= 1
    shard.write_bytes(data)
    output = tmp_path / "out" / "model"
    result = call("merge", saved, 5, "--output", output)
    assert result.exit_code == 3
    assert shard.name in result.stderr.replace("\n", "")
    assert list(output.parent.iterdir()) == []
