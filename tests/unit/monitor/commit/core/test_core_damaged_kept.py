"""Retention counts checkpoints that one can resume from."""

from pathlib import Path

from trainsync.monitor.commit.core import CoreSettings, MonitorCore
from trainsync.storage.layout import RunDirectory

from tests.unit.monitor.saves import FIRST, SECOND, Clock, request, write_all


def test_a_damaged_newest_checkpoint_takes_no_place_of_a_whole_one(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    core = MonitorCore(run, CoreSettings(max_to_keep=2), clock=Clock())
    core.claim(FIRST, "main", None)
    for step in (10, 20):
        core.saves.register(FIRST, request(step))
        write_all(tmp_path, FIRST, step)
        core.tick()
    (run.step(20) / "actor/checkpoint_rank_0.pt").unlink()
    core.claim(SECOND, "main", None)
    point = core.resume(SECOND)
    assert point is not None
    assert point.step == 10
    for step in (11, 12, 13):
        core.saves.register(SECOND, request(step))
        write_all(tmp_path, SECOND, step)
        core.tick()
    assert run.steps() == [12, 13, 20]
