"""A hub, a token for it, and a merged model."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.unit.checkpoint.hub.hub_server import Hub, local_hub


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    with local_hub(monkeypatch, tmp_path) as found:
        yield found


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory as a merge makes it, with weights in two files."""
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen2"}\n')
    (folder / "tokenizer.json").write_text("{}")
    names = {}
    for number, name in enumerate(("a", "b"), 1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({name: torch.full((100,), float(number))}, folder / file)
        names[name] = file
    index = {"metadata": {"total_size": 800}, "weight_map": names}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }
