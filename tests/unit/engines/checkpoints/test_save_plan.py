"""The saves of a checkpoint, and their participants."""

from pathlib import Path

import pytest
from trainsync.api.protocol import SaveKind
from trainsync.engines.checkpoints.save_plan import (
    ModelMode,
    SavePlan,
    choose_model_mode,
    state_dict_exists,
)
from trainsync.storage.layout import RunDirectory

USUAL = {
    "wanted": True,
    "adapter_only": False,
    "alone": False,
    "saved": None,
    "skipped": None,
    "exists": False,
}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, ModelMode.STATE_DICT),
        ({"wanted": False}, ModelMode.NONE),
        ({"wanted": False, "exists": True}, ModelMode.NONE),
        ({"saved": 6, "exists": True}, ModelMode.STATE_DICT),
        ({"saved": 6}, ModelMode.STATE_DICT),
        ({"saved": 7}, ModelMode.REUSE),
        ({"saved": 7, "exists": True}, ModelMode.REUSE),
        ({"saved": 7, "adapter_only": True}, ModelMode.REUSE),
        ({"adapter_only": True}, ModelMode.OWN),
        ({"skipped": 7}, ModelMode.OWN),
        ({"skipped": 6}, ModelMode.STATE_DICT),
        # It needs a participant of its own, and the same bytes may be committed twice.
        ({"alone": True}, ModelMode.OWN),
        ({"alone": True, "saved": 7, "exists": True}, ModelMode.OWN),
        ({"exists": True}, ModelMode.STATE_DICT),
        ({"exists": True, "adapter_only": True}, ModelMode.OWN_UNWATCHED),
        ({"exists": True, "alone": True}, ModelMode.OWN_UNWATCHED),
        ({"exists": True, "skipped": 7}, ModelMode.OWN_UNWATCHED),
    ],
)
def test_where_the_weights_of_step_7_come_from(
    changed: dict[str, object], expected: ModelMode
) -> None:
    assert choose_model_mode(7, **{**USUAL, **changed}) is expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("mode", "state_dict", "checkpoint", "reuse"),
    [
        (ModelMode.STATE_DICT, {"model"}, {"optim"}, True),
        (ModelMode.REUSE, {"model"}, {"optim"}, True),
        (ModelMode.OWN, set(), {"model", "optim"}, False),
        (ModelMode.OWN_UNWATCHED, set(), {"model", "optim"}, False),
        (ModelMode.NONE, set(), {"optim"}, False),
    ],
)
def test_every_rank_takes_part_with_every_component(
    mode: ModelMode, state_dict: set[str], checkpoint: set[str], reuse: bool
) -> None:
    found = SavePlan("actor", mode, ("optim",), export=False).participants(7, 3)
    assert found.step == 7
    assert set(found.state_dict) == {(name, rank) for name in state_dict for rank in range(3)}
    assert set(found.checkpoint) == {(name, rank) for name in checkpoint for rank in range(3)}
    assert found.reuse_state_dict is reuse


def test_the_whole_model_is_written_by_rank_0_alone() -> None:
    found = SavePlan("actor", ModelMode.REUSE, (), export=True).participants(7, 3)
    assert found.checkpoint == (("hf_model", 0),)


def test_a_state_dict_exists_when_its_manifest_does(tmp_path: Path) -> None:
    assert not state_dict_exists(tmp_path, 7)
    manifest = RunDirectory(tmp_path).manifest(SaveKind.STATE_DICT, 7)
    manifest.parent.mkdir()
    manifest.write_text("{}")
    assert state_dict_exists(tmp_path, 7)
