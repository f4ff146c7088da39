"""What one rank hands to the coordinator, for every way in which a checkpoint gets its weights."""

from typing import Any

import pytest
import torch
from trainsync.engines.checkpoints.save_plan import ModelMode, SavePlan
from trainsync.engines.fsdp import saving
from trainsync.engines.fsdp.saving import PartsSaver, states_of
from trainsync.engines.fsdp.state_dicts import fsdp_save_state_dict
from trainsync.engines.fsdp.training_parts import TrainedParts


class Recorder:
    """A coordinator that accepts all components except the given ones."""

    world_size = 2

    def __init__(self, rank: int, skipped: str = "") -> None:
        self.rank = rank
        self.skipped = skipped
        self.saved: dict[str, tuple[bool, bool]] = {}

    def save_async(
        self, name: str, source: Any, step: int, is_state_dict: bool = False, **more: Any
    ) -> bool:
        assert (step, more["subdir"]) == (3, "actor")
        self.saved[name] = (is_state_dict, bool(more["attachments"]))
        return name != self.skipped


STATES: dict[str, dict[str, Any]] = {"model": {}, "optim": {}, "extra_state": {}}
STATE_DICT, CHECKPOINT, WITH_FILES, ALONE = True, False, True, False


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        (
            ModelMode.STATE_DICT,
            {"model": (STATE_DICT, WITH_FILES), "optim": (CHECKPOINT, ALONE)},
        ),
        (ModelMode.REUSE, {"optim": (CHECKPOINT, ALONE)}),
        (ModelMode.OWN, {"model": (CHECKPOINT, WITH_FILES), "optim": (CHECKPOINT, ALONE)}),
        (ModelMode.NONE, {"optim": (CHECKPOINT, WITH_FILES)}),
    ],
)
def test_the_small_files_come_once_and_from_rank_0(
    mode: ModelMode, expected: dict[str, tuple[bool, bool]]
) -> None:
    plan = SavePlan("actor", mode, ("optim",), export=False)
    needed = {name: STATES[name] for name in expected}
    for rank in (0, 1):
        coordinator = Recorder(rank)
        saver = PartsSaver(coordinator, torch.nn.Linear(1, 1), None)  # type: ignore[arg-type]
        assert saver.save(plan, 3, needed, {}) == dict.fromkeys(expected, True)
        wanted = {name: (kind, files and rank == 0) for name, (kind, files) in expected.items()}
        assert coordinator.saved == wanted


@pytest.mark.parametrize(("rank", "exported"), [(0, True), (1, False)])
def test_the_whole_model_is_handed_over_by_rank_0_alone(
    rank: int, exported: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving.export, "skeleton", lambda module: object())
    coordinator = Recorder(rank)
    saver = PartsSaver(coordinator, torch.nn.Linear(1, 1), None)  # type: ignore[arg-type]
    saver.save(SavePlan("actor", ModelMode.NONE, (), export=True), 3, {}, {})
    assert coordinator.saved == ({"hf_model": (CHECKPOINT, WITH_FILES)} if exported else {})


def test_what_was_skipped_is_told() -> None:
    coordinator = Recorder(1, skipped="optim")
    saver = PartsSaver(coordinator, torch.nn.Linear(1, 1), None)  # type: ignore[arg-type]
    plan = SavePlan("actor", ModelMode.STATE_DICT, ("optim", "extra_state"), export=False)
    assert saver.save(plan, 3, STATES, {}) == {"model": True, "optim": False, "extra_state": True}


def test_only_the_planned_states_are_gathered() -> None:
    module = torch.nn.Linear(1, 1)
    trained = TrainedParts(module, torch.optim.SGD(module.parameters()), None)

    def gathered(mode: ModelMode, *components: str) -> set[str]:
        plan = SavePlan("actor", mode, components, export=False)
        return set(states_of(plan, trained, dict, adapter_only=False))

    assert gathered(ModelMode.STATE_DICT, "optim", "extra_state") == set(STATES)
    assert gathered(ModelMode.REUSE, "optim") == {"optim"}
    assert gathered(ModelMode.OWN) == {"model"}


def test_an_engine_without_a_module_is_named() -> None:
    with pytest.raises(TypeError, match="object has no attribute 'module'; expected an FSDPEngine"):
        fsdp_save_state_dict(object(), "actor", 3, Recorder(0), None)  # type: ignore[arg-type]
