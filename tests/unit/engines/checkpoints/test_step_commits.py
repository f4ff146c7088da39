"""The participants of a step, collected from several models and registered once."""

import logging
import stat
from pathlib import Path
from typing import Any

import pytest
from trainsync.checkpoint.save.registration import Participants
from trainsync.engines.checkpoints.step_commits import StepCommits

ACTOR = Participants(1, (("model", 0),), (("optim", 0),), reuse_state_dict=True)
CRITIC = Participants(1, checkpoint=(("critic_model", 0), ("critic_optim", 0)))


class Watch:
    """Records the registrations."""

    def __init__(self) -> None:
        self.registered: list[tuple[Participants, bool]] = []

    def register(self, participants: Participants, *, tolerant: bool) -> None:
        self.registered.append((participants, tolerant))


def commits(directory: Path, *models: str, rank: int = 0) -> tuple[StepCommits, Watch]:
    watch: Any = Watch()
    made = StepCommits(directory, watch, rank)
    for model in models:
        made.join(model, None)  # type: ignore[arg-type] # what is saved is not waited for here
    return made, watch


def test_a_step_is_registered_when_the_last_model_has_saved_it(tmp_path: Path) -> None:
    step, watch = commits(tmp_path, "actor", "critic")
    step.add("actor", ACTOR, tolerant=False, held=False)
    assert (watch.registered, step.registered) == ([], None)
    step.add("critic", CRITIC, tolerant=True, held=False)
    both = Participants(1, ACTOR.state_dict, ACTOR.checkpoint + CRITIC.checkpoint, True)
    assert watch.registered == [(both, True)]
    assert step.registered == 1


def test_a_step_that_is_held_waits_for_the_trainers_last_word(tmp_path: Path) -> None:
    step, watch = commits(tmp_path, "actor")
    step.add("actor", ACTOR, tolerant=False, held=True)
    assert watch.registered == []
    assert not (tmp_path / "global_step_1").exists(), "the trainer writes elsewhere"
    for _ in range(2):  # the trainer may say it twice
        step.finish(1, [("trainer", 0)])
    ((registered, _),) = watch.registered
    assert registered.checkpoint == (*ACTOR.checkpoint, ("trainer", 0))
    with pytest.raises(ValueError, match="no model was saved at it"):
        step.finish(2, [("trainer", 0)])


def test_other_ranks_know_that_a_step_is_registered_and_leave_it_to_the_first(
    tmp_path: Path,
) -> None:
    step, watch = commits(tmp_path, "actor", rank=1)
    step.add("actor", ACTOR, tolerant=False, held=False)
    assert (watch.registered, step.registered) == ([], 1)


def test_a_step_that_a_model_left_out_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    step, watch = commits(tmp_path, "actor", "critic")
    step.add("actor", ACTOR, tolerant=False, held=False)
    with caplog.at_level(logging.WARNING):
        step.add(
            "critic", Participants(2, checkpoint=(("critic_model", 0),)), tolerant=False, held=False
        )
    assert "step 1 is not committed: it was saved without critic" in caplog.text
    assert watch.registered == []


def test_the_steps_directory_is_open_to_the_group_before_others_can_make_it(
    tmp_path: Path,
) -> None:
    closed = tmp_path / "global_step_2"
    closed.mkdir(mode=0o755)  # as an earlier attempt left it
    step, _ = commits(tmp_path, "actor")
    for number in (1, 2):
        one = Participants(number, checkpoint=(("optim", 0),))
        step.add("actor", one, tolerant=False, held=False)
        mode = (tmp_path / f"global_step_{number}").stat().st_mode
        assert stat.S_IMODE(mode) == 0o2775
