"""The whole way: saved by the library, merged by the command, loaded by transformers."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen2ForCausalLM

from tests.unit.cli.commands import call, document
from tests.unit.cli.small_models import assert_is, save, small_model


@pytest.fixture
def model() -> Qwen2ForCausalLM:
    return small_model()


@pytest.fixture
def saved(tmp_path: Path, model: Qwen2ForCausalLM) -> Path:
    return save(model, tmp_path / "run")


def test_a_merged_model_is_the_model(saved: Path, tmp_path: Path, model: Qwen2ForCausalLM) -> None:
    output = tmp_path / "out" / "model"
    found = document("merge", saved, 5, "--output", output)
    assert found["tensors"] == len(model.state_dict())
    assert_is(output, model)
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


def test_without_room_nothing_is_written_and_the_need_is_told(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = SimpleNamespace(f_blocks=100, f_bavail=2, f_frsize=1000)
    monkeypatch.setattr(os, "statvfs", lambda _: full)
    output = tmp_path / "out" / "model"
    result = call("merge", saved, 5, "--output", output)
    assert result.exit_code == 3
    assert "the merged weights need" in result.stderr
    assert f"the file system of {output.parent} has 2.0 kB free" in result.stderr
    assert list(output.parent.iterdir()) == []
