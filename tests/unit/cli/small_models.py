"""A tiny model, and a run's directory with its checkpoint, as the library saves it."""

import asyncio
from pathlib import Path

import torch
from trainsync.checkpoint.coordinator import CheckpointCoordinator
from trainsync.monitor.client.local import LocalMonitorClient
from transformers import AutoModelForCausalLM, Qwen2Config, Qwen2ForCausalLM

STEP = 5


def small_model() -> Qwen2ForCausalLM:
    """The same one each time."""
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


def save(model: Qwen2ForCausalLM, directory: Path) -> Path:
    """Commit the model and an optimizer's state at `STEP`; the directory."""
    monitor = LocalMonitorClient(directory, attempt=0, incarnation="0123456789abcdef")
    monitor.claim("local")
    coordinator = CheckpointCoordinator(monitor, directory)
    config = model.config.to_json_string().encode()
    attachments = {"huggingface/config.json": config, "huggingface/tokenizer.json": b"{}"}
    coordinator.save_sync("model", model.state_dict(), STEP, attachments=attachments)
    coordinator.save_sync("optim", {"step": torch.zeros(1000)}, STEP)
    participants = [("model", 0), ("optim", 0)]
    asyncio.run(
        coordinator.register_and_monitor(STEP, checkpoint_participants=participants, timeout=30)
    )
    monitor.close()
    return directory


def assert_is(output: Path, model: Qwen2ForCausalLM) -> None:
    """transformers loads ``output`` as the model, bit for bit."""
    loaded = AutoModelForCausalLM.from_pretrained(output)
    for name, tensor in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], tensor), name
