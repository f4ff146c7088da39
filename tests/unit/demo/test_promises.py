from dataclasses import replace

import pytest

from demo.history import Fault, History
from demo.promises import Verification, check
from demo.snapshot import Snapshot

VERIFIED = Verification((15, 20))
TOTAL = 20
ONE_JOB = "a killed process restarts in its pod, and a killed pod costs one new job"


def snapshot(
    step: int, committed: int | None, attempt: int, start: int, in_place: int = 0
) -> Snapshot:
    metrics = {
        "reward": step / TOTAL,
        "probe_max_abs_diff": 1e-6,
        "probe_tolerance": 1e-4,
        "resumed_step": float(start),
    }
    return Snapshot(
        phase="Running",
        attempt=attempt,
        restarts=attempt,
        step=step,
        total=TOTAL,
        metrics=metrics,
        committed=committed,
        version=step,
        lag=0,
        explorers=2,
        message="runs",
        restarts_in_place=in_place,
    )


def with_a_killed_process() -> History:
    """Killed at step 10; a report each second."""
    history = History()
    for step in range(1, 11):
        history.tell(snapshot(step, step // 5 * 5 or None, 0, 0), float(step))
    history.kill(Fault.PROCESS, 10.5)
    # The status still holds the report from before.
    history.tell(snapshot(10, 10, 0, 0, 1), 12.0)
    for step in range(11, 16):
        history.tell(snapshot(step, step // 5 * 5, 0, 10, 1), step + 4.0)
    return history


def good_story() -> History:
    history = with_a_killed_process()
    history.kill(Fault.POD, 20.0)
    # The attempt changes while the status still holds the report of the one before.
    history.tell(replace(snapshot(15, 15, 0, 10), phase="Restarting", attempt=1, restarts=1), 21.0)
    for step in range(16, 21):
        history.tell(snapshot(step, 15, 1, 15), step + 30.0)
    history.tell(replace(snapshot(20, 20, 1, 15), phase="Complete"), 51.0)
    return history


def broken(history: History, verified: Verification = VERIFIED) -> list[str]:
    return [promise.text for promise in check(history, verified) if not promise.kept]


def test_a_good_run_keeps_everything() -> None:
    assert broken(good_story()) == []


def test_a_pause_is_from_the_kill_to_the_first_step_of_trainers_that_resumed() -> None:
    process, pod = good_story().kills
    assert (process.resumed, process.pause) == (10, 4.5)
    assert (pod.resumed, pod.pause) == (15, 26.0)


def test_a_save_that_commits_after_the_kill_counts() -> None:
    history = with_a_killed_process()
    for step in range(16, 20):
        history.tell(snapshot(step, 15, 0, 10, 1), step + 4.0)
    history.kill(Fault.POD, 24.0)
    history.tell(replace(snapshot(19, 18, 0, 10), phase="Restarting", attempt=1, restarts=1), 25.0)
    history.tell(snapshot(19, 18, 1, 18), 50.0)
    assert (history.kills[-1].before, history.kills[-1].resumed) == (18, 18)


@pytest.mark.parametrize("resumed", [11, 0])
def test_a_resume_from_before_the_last_commit_is_broken(resumed: int) -> None:
    history = with_a_killed_process()
    history.kill(Fault.POD, 20.0)
    for step in range(resumed + 1, 21):
        history.tell(snapshot(step, 15 if step < 20 else 20, 1, resumed), step + 30.0)
    history.tell(replace(snapshot(20, 20, 1, resumed), phase="Complete"), 51.0)
    assert "no step is lost past the last commit" in broken(history)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"phase": "Failed"}, "the run is Complete at its last step"),
        ({"step": 19}, "the run is Complete at its last step"),
        ({"attempt": 2, "restarts": 2}, ONE_JOB),
        ({"attempt": 0, "restarts": 0}, ONE_JOB),
        ({"lag": 1}, "every explorer ends with the last weights"),
        ({"explorers": 0}, "every explorer ends with the last weights"),
    ],
)
def test_a_bad_end_is_broken(change: dict[str, object], text: str) -> None:
    history = good_story()
    history.tell(replace(history.last, **change), 52.0)  # type: ignore[arg-type]
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
    text = "every committed checkpoint verifies"
    assert broken(good_story(), verified) == [text]


def test_a_process_whose_death_took_a_new_job_is_broken() -> None:
    history = good_story()
    process = history.kills[0]
    assert process.after is not None
    process.after = replace(process.after, attempt=1, restarts_in_place=0)
    assert broken(history) == [ONE_JOB]


def test_a_run_whose_trainers_were_never_killed_proves_nothing() -> None:
    history = History()
    for step in range(1, 21):
        history.tell(snapshot(step, step // 5 * 5 or None, 0, 0), float(step))
    history.tell(replace(history.last, phase="Complete"), 21.0)
    assert broken(history)[:2] == [ONE_JOB, "no step is lost past the last commit"]


def test_the_process_is_killed_after_the_second_commit_and_the_pod_after_one_more() -> None:
    history = History()
    for step in range(1, 10):
        history.tell(snapshot(step, step // 5 * 5 or None, 0, 0), float(step))
        assert history.next_fault(2) is None
    history.tell(snapshot(10, 10, 0, 0), 10.0)
    assert history.next_fault(2) is Fault.PROCESS
    history.kill(Fault.PROCESS, 10.5)
    for step in range(11, 15):
        assert history.next_fault(2) is None
        history.tell(snapshot(step, 10, 0, 10, 1), step + 4.0)
    history.tell(snapshot(15, 15, 0, 10, 1), 19.0)
    assert history.next_fault(2) is Fault.POD
    history.kill(Fault.POD, 20.0)
    assert history.next_fault(2) is None
    history.tell(replace(snapshot(20, 20, 1, 15), phase="Complete"), 60.0)
    assert history.next_fault(2) is None
