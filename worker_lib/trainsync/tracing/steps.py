"""Records what happened in a step, and does nothing at all where no endpoint is set.

Names follow the draft of OpenTelemetry's semantic conventions for reinforcement learning
(https://github.com/open-telemetry/semantic-conventions-genai/issues/88): ``rl.loop`` (a step),
``rl.sample``, ``rl.reward``, ``rl.train``, ``rl.sync``. What the draft has no name for begins with
``trainsync.``: ``save`` with ``save.stage``, ``save.write`` and ``save.commit``, ``take`` and
``wait``.
"""

import atexit
import logging
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from trainsync.tracing.identity import Key
from trainsync.tracing.recorded import Attributes, TraceStats
from trainsync.tracing.wanted import endpoint

if TYPE_CHECKING:
    from trainsync.tracing.exporting import Exporting

logger = logging.getLogger(__name__)

_END_SECONDS: Final = 5.0


_exporting: "Exporting | None" = None
_asked = False
_starting = threading.Lock()


def start(resource: Attributes, environ: Mapping[str, str] = os.environ) -> None:
    """Send the traces of this process, if ``environ`` names where to; once for each process.

    What is wrong with the environment is logged, and training goes on without traces.

    Args:
        resource: says what this process is, in every message.
    """
    global _exporting, _asked
    with _starting:
        if _asked:
            return
        _asked = True
        try:
            if (url := endpoint(environ)) is None:
                return
            from trainsync.tracing.exporting import Exporting

            _exporting = Exporting(url, resource)
        except ValueError as error:
            logger.warning("no traces are sent: %s", error)
        except ModuleNotFoundError as error:
            logger.warning(
                "no traces are sent: they need %s, which is not installed: in a clone of "
                "trainsync, pip install '.[otlp]'",
                error.name,
            )
        except Exception as error:  # noqa: BLE001 - packages that do not fit one another
            kind = type(error).__name__
            logger.warning("no traces are sent: OpenTelemetry cannot begin: %s: %s", kind, error)
        else:
            atexit.register(stop)


def is_on() -> bool:
    """Whether this process sends traces."""
    return _exporting is not None


def stats() -> TraceStats:
    """Counts what became of this process's spans."""
    return TraceStats() if _exporting is None else _exporting.stats


def flush(timeout: float = _END_SECONDS) -> bool:
    """Wait until what was recorded is sent or refused; False: ``timeout`` seconds passed."""
    return _exporting is None or _exporting.wait(timeout)


def stop(timeout: float = _END_SECONDS) -> None:
    """Send what waits, for ``timeout`` seconds at most, and record nothing more; logs the loss."""
    global _exporting, _asked
    ended, _exporting, _asked = _exporting, None, False
    if ended is None:
        return
    atexit.unregister(stop)
    ended.wait(timeout)
    counts = ended.stats
    if lost := counts.ended - counts.sent:
        logger.warning("%d of %d spans did not reach %s", lost, counts.ended, ended.url)


def wall(moment: float) -> float:
    """The time of day, in seconds since 1970, of a ``moment`` of `time.monotonic`."""
    return time.time() - (time.monotonic() - moment)


@dataclass(frozen=True)
class StepTracer:
    """Records spans of an attempt's steps. Any thread may use it; it may be pickled.

    Times are seconds since 1970, as of `time.time`.

    Args:
        incarnation: of the attempt.
    """

    incarnation: str

    @contextmanager
    def span(
        self,
        step: int,
        name: str,
        attributes: Attributes | None = None,
        *,
        key: Key | None = None,
    ) -> Iterator[None]:
        """Record the body, which lies under the span around it, if that is of this step.

        While it runs it is OpenTelemetry's current span: instrumented HTTP clients pass it on.

        Args:
            key: of this span, under which others are recorded; None: there are none.
        """
        if _exporting is None:
            yield
            return
        with _exporting.open(self.incarnation, step, name, attributes or {}, key):
            yield

    def record(
        self,
        step: int,
        name: str,
        began: float,
        ended: float | None = None,
        attributes: Attributes | None = None,
        *,
        key: Key | None = None,
        under: Key = (),
        error: BaseException | None = None,
    ) -> None:
        """Record what is over: from ``began`` to ``ended``, by default now.

        Args:
            key: of this span; ``()`` makes it the step's own, of which there is one.
            under: of the span that this one is a part of.
            error: it failed with this.
        """
        if _exporting is not None:
            end = time.time() if ended is None else ended
            _exporting.record(
                self.incarnation, step, name, began, end, attributes or {}, key, under, error
            )


class LoopSpans:
    """The spans of a training loop's steps: each from the report of the step before to its own.

    Attributes:
        tracer: records them, and what lies under them.
    """

    def __init__(self, tracer: StepTracer) -> None:
        self.tracer: Final = tracer
        self._began = time.time()  # of the step that is reported next
        self._last = -1

    def begin(self) -> None:
        """The step that is reported next begins now."""
        self._began = time.time()

    def reported(self, step: int) -> None:
        """Record the step, which ends now, and begin the next one."""
        if step > self._last:  # the last step is reported again at the end
            began, self._began, self._last = self._began, time.time(), step
            self.tracer.record(step, "rl.loop", began, key=())
