import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from trainsync.checkpoint.errors import MergeError
from trainsync.storage.layout import RunDirectory

from tests.unit.cli.commands import call, document
from tests.unit.monitor.saves import CHECKPOINT, STATE_DICT


@dataclass
class Result:
    output: Path
    tensors: int = 3
    bytes: int = 12
    files: tuple[str, ...] = ("config.json", "model.safetensors")
    tied: tuple[str, ...] = ("lm_head.weight",)


@pytest.fixture
def merging(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """In the place of the real one, which needs torch."""
    module = ModuleType("trainsync.checkpoint.merge.merge")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def test_what_is_asked_for_is_merged_and_told(
    run: RunDirectory, tmp_path: Path, merging: ModuleType
) -> None:
    calls: list[dict[str, Any]] = []

    def merge_to_hf(
        directory: Path, step: int, output: Path, *, on_progress: Callable[[int, int], None],
        **options: Any,
    ) -> Result:  # fmt: skip
        calls.append({"directory": directory, "step": step, "output": output} | options)
        on_progress(5, 10)
        on_progress(10, 10)
        return Result(output)

    merging.merge_to_hf = merge_to_hf  # type: ignore[attr-defined]
    output = tmp_path / "model"
    found = document("merge", run.root, 20, "--output", output)
    assert found["kind"] == "checkpoint"
    assert found["output"] == str(output)
    assert (found["tensors"], found["bytes"], found["tied"]) == (3, 12, ["lm_head.weight"])
    result = call(
        *("merge", run.root, 20, "-o", output, "--kind", "state_dict"),
        *("--dtype", "bfloat16", "--subdir", "ref", "--base", tmp_path / "base"),
    )
    assert result.exit_code == 0
    assert "3 tensors" in result.stdout
    where = {"directory": run.root, "step": 20, "output": output}
    assert calls == [
        where | {"kind": CHECKPOINT, "dtype": None, "subdir": None, "base": None},
        where
        | {"kind": STATE_DICT, "dtype": "bfloat16", "subdir": "ref", "base": tmp_path / "base"},
    ]


def test_what_cannot_be_merged_is_one_sentence(
    run: RunDirectory, tmp_path: Path, merging: ModuleType
) -> None:
    def merge_to_hf(*_args: object, **_options: object) -> None:
        raise MergeError("it has no config.json")

    merging.merge_to_hf = merge_to_hf  # type: ignore[attr-defined]
    result = call("merge", run.root, 10, "-o", tmp_path / "model", "--json")
    assert result.exit_code == 3
    assert result.stderr == "checkpoint 10 was not merged: it has no config.json\n"
    assert result.stdout == ""


def test_without_torch_it_says_how_to_install_it(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def import_module(_name: str) -> ModuleType:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr(importlib, "import_module", import_module)
    result = call("merge", run.root, 10, "-o", tmp_path / "model")
    assert result.exit_code == 3
    assert "merge needs torch" in result.stderr
    assert "pip install '.[worker]'" in result.stderr.replace("\n", " ")


def test_wrong_usage_is_told_before_torch_is_loaded(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib, "import_module", None)
    output = tmp_path / "model"
    assert "step 11 is not committed" in call("merge", run.root, 11, "-o", output).stderr
    result = call("merge", run.root, 10, "-o", output, "--kind", "state_dict")
    assert result.exit_code == 2
    assert "state_dict 10 is not committed" in result.stderr
    output.mkdir()
    (output / "file").touch()
    result = call("merge", run.root, 10, "-o", output)
    assert result.exit_code == 2
    assert "not empty" in result.stderr
    assert call("merge", run.root, 10, "-o", output, "--dtype", "int8").exit_code == 2
    assert call("merge", run.root, 10).exit_code == 2
