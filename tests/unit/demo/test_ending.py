"""What a run that is complete says last."""

from pathlib import Path
from typing import Any

from demo.ending import last_words
from demo.kubectl import Kubectl, Object
from demo.snapshot import Snapshot, snapshot_of


def complete(step: int, committed: int, version: int, lag: int) -> Object:
    status: dict[str, Any] = {
        "phase": "Complete",
        "progress": {"step": step, "totalSteps": 12},
        "checkpoint": {"lastCommitted": {"step": committed}},
        "weights": {"trainerVersion": version, "lag": lag},
    }
    return {"status": status}


class Answers(Kubectl):
    """Gives these runs one after the other, and the last one again and again."""

    runs: list[Object]

    def get(self, kind: str, name: str, namespace: str) -> Object | None:
        return self.runs.pop(0) if len(self.runs) > 1 else self.runs[0]


def answering(*runs: Object) -> Kubectl:
    found = Answers(Path("kubectl"), Path("kubeconfig"))
    object.__setattr__(found, "runs", list(runs))
    return found


def ended(*runs: Object, seconds: float = 30.0) -> Snapshot:
    return last_words(answering(*runs), "run", "team", snapshot_of(runs[0]), seconds)


def test_what_the_monitor_tells_after_the_run_was_complete_is_waited_for() -> None:
    late = complete(12, 8, 12, 0), complete(12, 12, 11, 1), complete(12, 12, 12, 0)
    end = ended(complete(11, 8, 11, 1), *late)
    assert (end.step, end.committed, end.version, end.lag) == (12, 12, 12, 0)


def test_a_run_without_checkpoints_or_weights_has_told_all_with_its_last_step() -> None:
    assert snapshot_of({"status": {"progress": {"step": 12, "totalSteps": 12}}}).told
    assert not snapshot_of({"status": {"phase": "Complete"}}).told


def test_a_run_that_never_tells_of_its_end_is_given_as_it_is() -> None:
    end = ended(complete(12, 8, 12, 0), seconds=0.1)
    assert (end.phase, end.committed) == ("Complete", 8)
