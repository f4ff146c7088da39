"""Retention counts checkpoints that one can resume from."""

from pathlib import Path

from trainsync.storage.layout import RunDirectory

from tests.unit.monitor.core.cores import Start, commit
from tests.unit.monitor.saves import SECOND


def test_a_damaged_newest_checkpoint_takes_no_place_of_a_whole_one(
    start: Start, tmp_path: Path
) -> None:
    run = RunDirectory(tmp_path)
    core = start(max_to_keep=2)
    for step in (10, 20):
        commit(core, tmp_path, step)
    (run.step(20) / "actor/checkpoint_rank_0.pt").unlink()
    core.claim(SECOND, "main", None)
    point = core.resume(SECOND)
    assert point is not None
    assert point.step == 10
    for step in (11, 12, 13):
        commit(core, tmp_path, step, SECOND)
    assert run.steps() == [12, 13, 20]
