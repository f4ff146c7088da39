"""The commands beside a monitor that is at work on the same directory."""

from pathlib import Path

from trainsync.monitor.core.core import CoreSettings, MonitorCore
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves import pointers

from tests.unit.cli.commands import call, document, findings
from tests.unit.monitor.saves import CHECKPOINT, FIRST, Clock, request, write, write_all


def test_a_monitor_goes_on_after_what_the_commands_did_beside_it(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    core = MonitorCore(run, CoreSettings(max_to_keep=4), clock=Clock())
    core.claim(FIRST, "main", None)
    for step in range(10, 70, 10):
        core.saves.register(FIRST, request(step))
        write(tmp_path, FIRST, step, 0)
        # Half-way through the save.
        document("prune", tmp_path, "--keep", 2, "--yes", "--force")
        document("repair", tmp_path)
        assert {severity for severity, _, _ in findings("verify", tmp_path, code=0)} == {"leftover"}
        write(tmp_path, FIRST, step, 1)
        core.tick()
        assert pointers.read_pointer(run, CHECKPOINT) == step
    point = core.resume(FIRST)
    assert point is not None
    assert point.step == 60
    assert run.steps() == [40, 50, 60]
    assert core.view().checkpoint.last_error is None
    assert findings("verify", tmp_path, code=0) == []


def test_prune_without_force_leaves_a_directory_to_its_monitor(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    core = MonitorCore(run, CoreSettings(), clock=Clock())
    core.claim(FIRST, "main", None)
    for step in (10, 20, 30):
        core.saves.register(FIRST, request(step))
        write_all(tmp_path, FIRST, step)
        core.tick()
        assert call("prune", tmp_path, "--keep", 1, "--yes").exit_code == 3
    assert run.steps() == [10, 20, 30]
