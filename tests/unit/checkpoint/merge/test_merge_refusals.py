"""A merge that is refused or fails leaves nothing behind."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from trainsync.api.protocol import SaveKind
from trainsync.checkpoint.errors import CorruptCheckpointError, MergeError
from trainsync.checkpoint.merge import merge
from trainsync.checkpoint.merge.merge import merge_to_hf
from trainsync.checkpoint.merge.safetensors import write

from tests.unit.checkpoint.merge.models import (
    STEP,
    TWO_RANKS,
    Commit,
    assert_refused,
    build,
    cut,
    small_files,
)


def test_plain_shards_of_several_ranks_are_refused(commit: Commit, tmp_path: Path) -> None:
    model = build()
    name = "model.norm.weight"
    states = {rank: model.state_dict() | {name: torch.full((16,), float(rank))} for rank in (0, 1)}
    directory = commit(states, small_files(model))
    assert_refused(directory, tmp_path, f"{name} is a plain tensor that differs between ranks")


def test_what_cannot_be_merged_is_refused_with_what_was_expected(
    commit: Commit, tmp_path: Path
) -> None:
    model = build()
    states = cut(model.state_dict(), TWO_RANKS)
    directory = commit(states, small_files(model))
    assert_refused(directory, tmp_path, "dtype 'int8' is not one of float32", dtype="int8")
    assert_refused(directory, tmp_path, "no component model in critic/", subdir="critic")
    assert_refused(
        directory, tmp_path, "no state_dict of step 5 .* there is none", kind=SaveKind.STATE_DICT
    )
    with pytest.raises(MergeError, match=r"no checkpoint of step 6 is committed.*the last are 5"):
        merge_to_hf(directory, 6, tmp_path / "out")
    with pytest.raises(MergeError, match="inside the run's directory"):
        merge_to_hf(directory, STEP, directory / "merged")
    full = tmp_path / "full"
    full.mkdir()
    (full / "mine").write_text("precious")
    with pytest.raises(MergeError, match="full is not empty"):
        merge_to_hf(directory, STEP, full)
    with pytest.raises(MergeError, match="mine is not a directory"):
        merge_to_hf(directory, STEP, full / "mine")
    assert (full / "mine").read_text() == "precious"


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda state: state.pop("model.norm.weight"), "the checkpoint lacks model.norm.weight"),
        (
            lambda state: state.update(
                {"model.layers.0.mlp.up_proj.lora_A.weight": torch.zeros(1)}
            ),
            "belongs to an adapter that is not plain LoRA",
        ),
        (
            lambda state: state.update({"_orig_mod.model.norm.weight": torch.zeros(1)}),
            "are both model.norm.weight without wrappers",
        ),
        (
            lambda state: state.update({"lm_head.weight": torch.zeros(33, 16)}),
            "lm_head.weight and model.embed_tokens.weight are one weight",
        ),
        (lambda state: state.update({"note": "hello"}), "note is a str; expected weights"),
        (
            lambda state: state.update({"model.norm.weight": torch.zeros(16, dtype=torch.cfloat)}),
            "complex64, which safetensors has not",
        ),
    ],
)
def test_a_state_that_is_not_a_models_is_refused(
    commit: Commit, tmp_path: Path, change: Callable[[dict[str, Any]], object], why: str
) -> None:
    model = build()
    state = dict(model.state_dict())
    change(state)
    directory = commit({0: state}, small_files(model))
    assert_refused(directory, tmp_path, why)


def test_a_state_without_weights_is_refused(commit: Commit, tmp_path: Path) -> None:
    """As older versions of trainsync let it be saved."""

    def save(directory: Path) -> None:
        torch.save({}, directory / "model_world_size_1_rank_0.pt")

    directory = commit({0: save}, small_files(build()))
    assert_refused(directory, tmp_path, "hold no tensors")


@pytest.mark.parametrize(
    ("content", "why"),
    [(None, "has no actor/huggingface/config.json; expected"), (b"{", "config.json cannot be")],
)
def test_a_step_without_a_configuration_is_refused(
    commit: Commit, tmp_path: Path, content: bytes | None, why: str
) -> None:
    model = build()
    attachments = {} if content is None else {"huggingface/config.json": content}
    directory = commit({0: dict(model.state_dict())}, attachments)
    assert_refused(directory, tmp_path, why)


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "bytes, expected"),
        (Path.unlink, "is missing"),
        (
            lambda path: path.write_bytes(
                path.read_bytes()[:9000] + b"?" + path.read_bytes()[9001:]
            ),
            "has digest .* expected",
        ),
    ],
)
@pytest.mark.parametrize("name", ["model_world_size_2_rank_0.pt", "model_world_size_2_rank_1.pt"])
def test_damage_is_found_and_named_and_leaves_nothing(
    commit: Commit, tmp_path: Path, damage: Callable[[Path], object], why: str, name: str
) -> None:
    model = build()
    directory = commit(cut(model.state_dict(), TWO_RANKS), small_files(model))
    damage(directory / f"global_step_{STEP}/actor" / name)
    assert_refused(directory, tmp_path, f"{name}.*{why}", CorruptCheckpointError)


def test_a_disk_that_fails_while_it_is_written_leaves_nothing(
    commit: Commit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build()
    directory = commit(cut(model.state_dict(), TWO_RANKS), small_files(model))

    def full(*arguments: object) -> None:
        write(*arguments)  # type: ignore[arg-type]
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(merge, "write", full)
    threads = torch.get_num_threads()
    assert_refused(directory, tmp_path, "No space left", OSError)
    assert torch.get_num_threads() == threads  # a merge takes one alone, and gives them back
