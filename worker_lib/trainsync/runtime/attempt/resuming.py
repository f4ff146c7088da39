"""Asks the monitor which checkpoint an attempt resumes from, and opens it."""

from collections.abc import Callable
from functools import partial
from typing import Final

from trainsync.api.protocol import LoadReport, ResumePoint
from trainsync.checkpoint.load.resume import Resume, open_resume, open_stored_resume
from trainsync.monitor.client.base import MonitorClient
from trainsync.runtime.attempt import spmd
from trainsync.runtime.settings import RunSettings

# Other ranks wait so long for rank 0, whose monitor may read a checkpoint for an hour.
_RESUME_SECONDS: Final = 3900.0


class Resuming:
    """The checkpoint that this process was told to resume from.

    Args:
        settings: of the incarnation in force.
        monitor: opens this process's client of the monitor.
        report_damage, report_load: tell the run's monitor how a load went. A `Resume` that is sent
            to another process carries them along: bound methods of what can be pickled.
        opened: called when a checkpoint was opened, or there is none: training begins then.
    """

    def __init__(
        self,
        settings: RunSettings,
        monitor: Callable[[], MonitorClient],
        *,
        report_damage: Callable[[ResumePoint, str], bool],
        report_load: Callable[[LoadReport], None],
        opened: Callable[[], None],
    ) -> None:
        self._settings = settings
        self._monitor = monitor
        self._report_damage = report_damage
        self._report_load = report_load
        self._opened = opened
        self._known: Resume | None = None
        self._asked = False

    def together(self) -> Resume | None:
        """See `RunContext.resume`."""
        answer = spmd.ask_once("resume", self._ask, _RESUME_SECONDS)
        return self._open(ResumePoint.model_validate_json(answer) if answer else None)

    def alone(self) -> Resume | None:
        """See `RunContext.resume_here`."""
        if not self._asked:
            self._open(self._monitor().resume())
        return self._known

    def restart(self, settings: RunSettings) -> None:
        """The attempt goes on as ``settings`` say, from a checkpoint that is asked for anew."""
        self._settings = settings
        self._asked = False

    def _ask(self) -> str:
        point = self._monitor().resume()
        return "" if point is None else point.model_dump_json()

    def _open(self, point: ResumePoint | None) -> Resume | None:
        self._known = None if point is None else self._read(point)
        self._asked = True
        self._opened()
        return self._known

    def _read(self, point: ResumePoint) -> Resume:
        damaged = partial(self._report_damage, point)
        memory, store = self._settings.memory_place, self._settings.store
        if store is not None:
            return open_stored_resume(store, point, damaged, memory, self._report_load)
        return open_resume(self._settings.directory, point, damaged, memory, self._report_load)
