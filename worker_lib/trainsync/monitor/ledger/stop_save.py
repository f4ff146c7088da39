"""The save that is asked for before a run gives up its pods, and what is at risk. Pure."""

from dataclasses import dataclass
from datetime import datetime

from trainsync.api.protocol import SaveKind, SaveState
from trainsync.api.status import AtRisk, Progress, StopSave, StopSaveState
from trainsync.monitor.ledger.ledger import Ledger
from trainsync.monitor.ledger.saves import SaveKey, SaveOwner


@dataclass(frozen=True)
class StopAnswer:
    """The trainers' word: ``step`` is saved for the request of ``since``."""

    since: datetime
    owner: SaveOwner
    step: int


def stop_save(answer: StopAnswer | None, ledger: Ledger) -> StopSave | None:
    """The state of the answer's save; None without an answer of the attempt in force."""
    if answer is None or answer.owner not in ledger.owners:
        return None
    save = ledger.find(SaveKey(answer.owner, answer.step, SaveKind.CHECKPOINT))
    state = StopSaveState.SAVING
    # Of the save, too: retention may have taken the step since.
    committed = save is not None and save.state is SaveState.COMMITTED
    if committed or ledger.info(SaveKind.CHECKPOINT, answer.step) is not None:
        state = StopSaveState.COMMITTED
    elif save is not None and save.state is SaveState.ABORTED:
        state = StopSaveState.FAILED
    return StopSave(since=answer.since, step=answer.step, state=state)


def at_risk(
    progress: Progress | None, first_report: datetime | None, ledger: Ledger, gpus: float
) -> AtRisk | None:
    """The work since the last commit, at the time of the newest report; None before a report.

    Args:
        first_report: of the attempt.
        gpus: that the run's pods ask for.
    """
    if progress is None or first_report is None:
        return None
    last = ledger.newest(SaveKind.CHECKPOINT)
    steps = max(progress.step - (last.step if last else 0), 0)
    # What this monitor heard first is the attempt's first report only if none was there before it.
    own = last is not None and last.age[:2] == (True, ledger.attempt)
    since = last.time if last is not None and own else first_report
    seconds = max(int((progress.last_report_time - since).total_seconds()), 0) if steps else 0
    return AtRisk(steps=steps, seconds=seconds, gpu_seconds=round(seconds * gpus))
