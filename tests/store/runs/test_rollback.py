"""A run in a bucket goes back to an older checkpoint, and its monitor is killed amid that.

On a real server.

``test_rollback URL POINT COUNT``: a monitor that claims attempt 1, and is
killed when it comes to the point for the COUNT-th time.
"""

import os
import signal
import sys

import pytest
from trainsync.api.spec import ResumeFrom
from trainsync.api.status import RollbackState
from trainsync.failpoints import LIVE, enabled
from trainsync.storage.objects import commits, keys
from trainsync.storage.objects.of_run import open_run_store

from tests.store.conftest import Place
from tests.store.processes.forked import run_killed
from tests.unit.cli.commands import findings
from tests.unit.monitor.store.runs import CHECKPOINT, FIRST, SECOND, Served, save


def served(url: str) -> Served:
    run = Served()
    run.bucket = open_run_store(url)
    return run


def set_aside(place: Place) -> list[str]:
    return [key.rpartition("/")[2] for key in place.objects() if f"/{keys.ROLLED_BACK}/" in key]


@pytest.mark.parametrize(
    ("point", "count", "aside"),
    [
        ("rolling_back", 1, 0),
        ("rolling_back", 2, 1),
        ("rolled_aside", 1, 1),
        ("rolled_marked", 2, 2),
    ],
)
def test_a_monitor_killed_amid_a_rollback_is_followed_by_one_that_ends_it(
    place: Place, point: str, count: int, aside: int
) -> None:
    run = served(place.url())
    core = run.served()
    core.claim(FIRST, "main", 0)
    for step in (10, 20, 30):
        save(run, core, FIRST, step)
    before = [key for key in place.objects() if "/objects/" in key]
    core.resume_from(ResumeFrom(step=10))
    run_killed("tests.store.runs.test_rollback", place.url(), point, count)
    assert commits.read_pointer(run.bucket, CHECKPOINT) == 10
    assert len(set_aside(place)) == aside

    again = run.served()
    found = again.view().checkpoint.rollback
    assert found is not None
    assert (found.state, found.attempt, found.set_aside) == (RollbackState.DONE, 1, [20, 30])
    resume = again.resume(SECOND)
    assert resume is not None
    assert resume.step == 10
    assert set_aside(place) == ["global_step_20.json", "global_step_30.json"]
    assert [key for key in place.objects() if "/objects/" in key] == before
    save(run, again, SECOND, 20)
    assert commits.committed_steps(run.bucket, CHECKPOINT) == [10, 20]
    assert findings("verify", place.url(), code=0) == []


def _killed_at(url: str, where: str, count: int) -> None:
    left = count

    def kill(point: str) -> None:
        nonlocal left
        left -= point == where
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    core = served(url).served()
    with enabled(LIVE, kill):
        core.claim(SECOND, "main", 1)


if __name__ == "__main__":
    _killed_at(sys.argv[1], sys.argv[2], int(sys.argv[3]))
