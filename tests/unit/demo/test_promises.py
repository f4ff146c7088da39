from dataclasses import replace

import pytest

from demo.history import History
from demo.promises import Verification, check
from demo.snapshot import Snapshot

VERIFIED = Verification((15, 20))
TOTAL = 20


def snapshot(step: int, committed: int | None, attempt: int, start: int) -> Snapshot:
    metrics = {
        "reward": step / TOTAL,
        "probe_max_abs_diff": 1e-6,
        "probe_tolerance": 1e-4,
        "resumed_step": float(start),
    }
    return Snapshot(
        "Running", attempt, attempt, step, TOTAL, metrics, committed, step, 0, 2, "runs"
    )


def good_story() -> History:
    history = History()
    for step in range(1, 16):
        history.tell(snapshot(step, step // 5 * 5 or None, 0, 0))
    history.kill()
    # The attempt changes while the status still holds the report of the one before.
    history.tell(replace(snapshot(15, 15, 0, 0), phase="Restarting", attempt=1, restarts=1))
    for step in range(16, 21):
        history.tell(snapshot(step, 15, 1, 15))
    history.tell(replace(snapshot(20, 20, 1, 15), phase="Complete"))
    return history


def broken(history: History, verified: Verification = VERIFIED) -> list[str]:
    return [promise.text for promise in check(history, verified) if not promise.kept]


def test_a_good_run_keeps_everything() -> None:
    assert broken(good_story()) == []


def test_a_save_that_commits_after_the_kill_counts() -> None:
    history = History()
    for step in range(1, 16):
        history.tell(snapshot(step, 10 if step >= 10 else None, 0, 0))
    history.kill()
    history.tell(replace(snapshot(15, 15, 0, 0), phase="Restarting", attempt=1, restarts=1))
    history.tell(snapshot(16, 15, 1, 15))
    assert (history.committed_before_resume, history.resumed_step) == (15, 15)


@pytest.mark.parametrize(
    ("resumed", "text"),
    [(10, "no step is lost past the last commit"), (0, "no step is lost past the last commit")],
)
def test_a_resume_from_before_the_last_commit_is_broken(resumed: int, text: str) -> None:
    history = History()
    for step in range(1, 16):
        history.tell(snapshot(step, step // 5 * 5 or None, 0, 0))
    history.kill()
    for step in range(resumed + 1, 21):
        history.tell(snapshot(step, 15 if step < 20 else 20, 1, resumed))
    history.tell(replace(snapshot(20, 20, 1, resumed), phase="Complete"))
    assert text in broken(history)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"phase": "Failed"}, "the run is Complete at its last step"),
        ({"step": 19}, "the run is Complete at its last step"),
        ({"attempt": 2, "restarts": 2}, "one killed trainer costs one restart"),
        ({"lag": 1}, "every explorer ends with the last weights"),
        ({"explorers": 0}, "every explorer ends with the last weights"),
    ],
)
def test_a_bad_end_is_broken(change: dict[str, object], text: str) -> None:
    history = good_story()
    history.tell(replace(history.last, **change))  # type: ignore[arg-type]
    assert text in broken(history)


def test_one_wrong_probe_is_broken() -> None:
    history = good_story()
    history.probe_differences[7] = 1e-3
    assert broken(history) == ["explorers compute the trainer's log-probabilities at equal version"]


def test_a_reward_that_stays_is_broken() -> None:
    history = good_story()
    history.rewards = dict.fromkeys(history.rewards, 0.5)
    assert broken(history) == ["the reward rises by 0.2 or more"]


@pytest.mark.parametrize(
    "verified", [Verification(problem="step 5 is torn"), Verification((15,)), Verification()]
)
def test_a_checkpoint_that_does_not_verify_is_broken(verified: Verification) -> None:
    text = "every committed checkpoint on the volume verifies"
    assert broken(good_story(), verified) == [text]


def test_a_run_whose_trainer_was_never_killed_proves_nothing() -> None:
    history = History()
    for step in range(1, 21):
        history.tell(snapshot(step, step // 5 * 5 or None, 0, 0))
    history.tell(replace(history.last, phase="Complete"))
    assert "no step is lost past the last commit" in broken(history)


def test_the_kill_waits_for_the_third_commit_of_a_running_run() -> None:
    history = History()
    for step in range(1, 15):
        history.tell(snapshot(step, step // 5 * 5 or None, 0, 0))
        assert not history.ready_to_kill(3)
    history.tell(snapshot(15, 15, 0, 0))
    assert history.ready_to_kill(3)
    history.kill()
    assert not history.ready_to_kill(3)
