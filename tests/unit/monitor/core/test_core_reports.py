"""Progress and weights that are reported come out in the view."""

from trainsync.api.protocol import ExplorerReport, ProgressReport, WeightsReport
from trainsync.api.status import ConditionStatus

from tests.unit.monitor.core.cores import Start
from tests.unit.monitor.saves import FIRST, Clock


def test_reports_show_in_the_view(start: Start, clock: Clock) -> None:
    core = start()
    core.report_progress(FIRST, ProgressReport(step=0, total_steps=100))
    clock.go(60)
    metrics = {"reward": 0.5, "loss": float("nan")}
    core.report_progress(FIRST, ProgressReport(step=10, total_steps=100, metrics=metrics))
    explorers = [
        ExplorerReport(id="b", version=10, state="running"),
        ExplorerReport(id="a", version=-1, state="require_sync"),
        ExplorerReport(id="c", version=0, state="stopped"),
    ]
    core.report_weights(
        FIRST, WeightsReport(trainer_version=10, method="memory", explorers=explorers)
    )
    view = core.view()
    assert view.progress is not None
    assert (view.progress.steps_per_minute, view.progress.metrics) == (10.0, {"reward": 0.5})
    assert view.progress.eta is not None
    assert (view.progress.eta - clock.now).total_seconds() == 540
    assert view.weights is not None
    assert view.weights.lag == 11
    assert [(e.id, e.lag) for e in view.weights.explorers] == [("a", 11), ("b", 0), ("c", 10)]
    in_sync = view.conditions[1]
    assert (in_sync.status, in_sync.reason) == (ConditionStatus.FALSE, "ExplorersBehind")
