"""What a model takes is read from its checkpoint, and anything else is refused."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from trainsync.weights.buckets.layout import TensorMeta
from trainsync.weights.staging.checkpoint import (
    TIED_HEAD,
    checkpoint_tensors,
    misfit,
    open_checkpoint,
)
from trainsync.weights.transports.base import meta_of

_STATE = {
    "model.embed_tokens.weight": torch.zeros(4, 2, dtype=torch.bfloat16),
    TIED_HEAD: torch.zeros(4, 2, dtype=torch.bfloat16),
    "model.layers.0.scale": torch.zeros(3, dtype=torch.float8_e4m3fn),
    "steps": torch.zeros((), dtype=torch.int64),
}
_TAKES = [meta_of(*named) for named in _STATE.items()]


def _with(name: str, tensor: torch.Tensor) -> list[TensorMeta]:
    return [meta_of(*named) for named in {**_STATE, name: tensor}.items()]


def _without(name: str) -> list[TensorMeta]:
    return [meta for meta in _TAKES if meta.name != name]


def test_the_header_of_one_file_is_read(tmp_path: Path) -> None:
    save_file(_STATE, tmp_path / "model.safetensors")
    found = checkpoint_tensors(tmp_path)
    assert found is not None
    assert sorted(map(repr, found)) == sorted(map(repr, _TAKES))


def test_of_several_files_those_that_the_index_names_are_read(tmp_path: Path) -> None:
    names = list(_STATE)
    files = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(names)}
    for file in set(files.values()):
        save_file({n: _STATE[n] for n in names if files[n] == file}, tmp_path / file)
    save_file({"other": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    found = checkpoint_tensors(tmp_path)
    assert found is not None
    assert {meta.name for meta in found} == set(names)


def test_a_folder_without_safetensors_says_nothing(tmp_path: Path) -> None:
    assert checkpoint_tensors(tmp_path) is None


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ValueError, match="no file of safetensors"):
        checkpoint_tensors(tmp_path)


def test_the_tensors_of_the_checkpoint_fit_in_any_order() -> None:
    assert misfit(_TAKES, _TAKES[::-1], "bfloat16", tied=False) is None


def test_a_tied_head_may_come_or_not() -> None:
    for takes in (_TAKES, _without(TIED_HEAD)):
        for offered in (_TAKES, _without(TIED_HEAD)):
            assert misfit(takes, offered, "bfloat16", tied=True) is None
    assert misfit(_TAKES, _without(TIED_HEAD), "bfloat16", tied=False) is not None


def test_floats_may_come_in_the_dtype_of_the_model_and_no_other() -> None:
    half = _with(TIED_HEAD, torch.zeros(4, 2, dtype=torch.float16))
    assert misfit(_TAKES, half, "float16", tied=False) is None
    assert "float16[4, 2] instead of bfloat16[4, 2]" in str(
        misfit(_TAKES, half, "bfloat16", tied=False)
    )


@pytest.mark.parametrize(
    ("offered", "message"),
    [
        (_without("steps"), "steps is missing"),
        (_with("more", torch.zeros(1)), "more is not expected"),
        (_with("steps", torch.zeros((), dtype=torch.int32)), "int32[] instead of int64[]"),
        (_with(TIED_HEAD, torch.zeros(2, 4, dtype=torch.bfloat16)), "instead of bfloat16[4, 2]"),
        (
            _with("model.layers.0.scale", torch.zeros(3, dtype=torch.bfloat16)),
            "bfloat16[3] instead of float8_e4m3fn[3]",
        ),
        ([*_TAKES, _TAKES[0]], "a name comes twice"),
    ],
)
def test_other_weights_are_refused(offered: list[TensorMeta], message: str) -> None:
    assert message in str(misfit(_TAKES, offered, "bfloat16", tied=False))


def test_an_open_checkpoint_has_the_tensors_of_all_its_files(tmp_path: Path) -> None:
    save_file({"a": torch.arange(4.0)}, tmp_path / "1.safetensors")
    save_file({"b": torch.ones(2, 2)}, tmp_path / "2.safetensors")
    with open_checkpoint(tmp_path) as tensors:
        assert set(tensors) == {"a", "b"}
        assert len(tensors) == 2
        assert torch.equal(tensors["a"], torch.arange(4.0))
        assert tensors.get("c") is None


def test_a_checkpoint_that_was_cut_short_is_not_opened(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.arange(4.0)}, file)
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ValueError, match="is no file of safetensors"), open_checkpoint(tmp_path):
        pass
