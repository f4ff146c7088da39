"""A directory that does not hold a whole model is told from one that does."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from trainsync.checkpoint.hub.errors import ModelFilesError
from trainsync.checkpoint.hub.model_files import model_files

FIRST = "model-00001-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


def test_a_whole_model_has_all_of_its_files(model: Path) -> None:
    (model / ".gitattributes").write_text("")
    (model / "more").mkdir()
    (model / "more/notes.txt").write_text("x")
    found = {file.path: file.bytes for file in model_files(model)}
    assert found == {
        path.relative_to(model).as_posix(): path.stat().st_size
        for path in model.rglob("*")
        if path.is_file()
    }


def test_a_model_of_one_file_needs_no_index(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    save_file({"a": torch.ones(3), "empty": torch.ones(0)}, tmp_path / "model.safetensors")
    assert [file.path for file in model_files(tmp_path)] == ["config.json", "model.safetensors"]


def cut(name: str, left: int) -> Callable[[Path], object]:
    return lambda model: os.truncate(model / name, left)


def change_index(model: Path, change: Callable[[dict[str, str]], object]) -> None:
    content = json.loads((model / INDEX).read_text())
    change(content["weight_map"])
    (model / INDEX).write_text(json.dumps(content))


def header(data: bytes, after: bytes = b"") -> Callable[[Path], object]:
    whole = len(data).to_bytes(8, "little") + data + after
    return lambda model: (model / FIRST).write_bytes(whole)


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda model: (model / "config.json").unlink(), "has no config.json; expected what"),
        (cut("config.json", 5), "config.json is not JSON"),
        (lambda model: (model / "config.json").write_text("[]"), "is not a JSON object"),
        (cut("tokenizer.json", 1), "tokenizer.json is not JSON"),
        (cut(FIRST, 0), f"{FIRST} is cut short"),
        (cut(FIRST, 20), f"{FIRST} is cut short"),
        (cut(FIRST, 200), f"{FIRST} has 200 bytes, and its header speaks of"),
        (header(b"{}"), "has no tensors"),
        (header(b'{"a": {}}'), "a header that is not safetensors'"),
        (header(b'{"a": {"data_offsets": [4, 8]}}', b"12345678"), "a gap between tensors"),
        (lambda model: (model / FIRST).open("ab").write(b"x"), "and its header speaks of"),
        (lambda model: (model / FIRST).unlink(), f"{FIRST} is missing, and {INDEX} names it"),
        (lambda model: (model / INDEX).unlink(), f"no {INDEX}; a file is missing"),
        (cut(INDEX, 30), f"{INDEX} is not JSON"),
        (lambda model: (model / INDEX).write_text("{}"), "has no weight_map"),
        (lambda model: change_index(model, lambda m: m.pop("b")), "does not name it"),
        (lambda model: change_index(model, lambda m: m.update(c=m["a"])), "has other tensors than"),
        (lambda model: (model / "x").symlink_to("/etc/passwd"), "neither a file nor a directory"),
        (lambda model: (model / ".env").write_text("x"), "is hidden, and of no model"),
        (lambda model: [p.unlink() for p in model.glob("*.safetensors*")], "has no weights"),
    ],
)
def test_what_is_wrong_is_named(model: Path, damage: Callable[[Path], object], why: str) -> None:
    damage(model)
    with pytest.raises(ModelFilesError, match=why):
        model_files(model)


def test_what_is_no_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match="is not a directory"):
        model_files(tmp_path / "none")
