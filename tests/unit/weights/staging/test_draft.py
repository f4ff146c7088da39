"""A draft model's tensors are told apart by their names."""

from pathlib import Path

import torch
from trainsync.weights.staging.area import StagingArea
from trainsync.weights.staging.draft import of_draft, of_target
from trainsync.weights.staging.index import StagedReference

_TARGET = {"model.norm.weight": torch.ones(2), "model.draft.weight": torch.ones(3)}
_BOTH = {**_TARGET, "draft.model.norm.weight": torch.zeros(2)}


def test_a_draft_has_the_names_of_its_checkpoint() -> None:
    assert of_target(_BOTH).keys() == _TARGET.keys()
    assert list(of_draft(_BOTH)) == ["model.norm.weight"]
    assert of_draft(_BOTH)["model.norm.weight"] is _BOTH["draft.model.norm.weight"]
    assert of_draft(_TARGET) == {}


def test_a_reference_says_whether_a_draft_comes(tmp_path: Path) -> None:
    area = StagingArea(tmp_path)
    with_draft, without = area.stage(1, _BOTH), area.stage(2, _TARGET)
    area.close()
    assert with_draft.draft
    assert StagedReference.told(with_draft.as_dict()) == with_draft
    assert StagedReference.told(without.as_dict()) == without
    assert "draft" not in without.as_dict(), "an engine of an older release knows of none"
