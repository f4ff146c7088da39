"""Looks at the run once for all readers of the page: at most once a second."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from typing import Any, Final

from trainsync.api.page import RunPage, SavePoint
from trainsync.monitor.access.served_core import ServedCore
from trainsync.monitor.change_signal import ChangeSignal
from trainsync.monitor.core.core_thread import CoreThread
from trainsync.monitor.core.views import CoreView
from trainsync.monitor.errors import MonitorError
from trainsync.monitor.kube.run_reader import RunReader, StaleRunError
from trainsync.monitor.page import document, sections, snapshot
from trainsync.monitor.page.journal import Journal, save_point
from trainsync.monitor.page.snapshot import Identity, Sources
from trainsync.storage.saves.claims import Claim

_LOG = logging.getLogger(__name__)

MOST_STREAMS: Final = 32
_CORE_SECONDS: Final = 5.0
_RUN_SECONDS: Final = 2.0
_KEEPALIVE_SECONDS: Final = 15.0
# A browser connects again by itself; one that is gone without a word must not keep its place.
STREAM_SECONDS: Final = 600.0


@dataclass(frozen=True)
class MaxAges:
    """How old, in seconds, a page and its parts may be."""

    page: float = 1.0
    """No newer page is made within this time."""
    run: float = 5.0
    claims: float = 60.0


AGES: Final = MaxAges()


class TooManyStreamsError(Exception):
    """All places are taken."""


@dataclass(frozen=True)
class RenderedPage:
    """A page as it is sent. ``version`` grows when it says something else."""

    version: int
    page: RunPage

    @cached_property
    def html(self) -> str:
        """The document, made once for all requests of a second."""
        return document.render(self.page)

    @cached_property
    def json(self) -> bytes:
        """The same for programs."""
        return json.dumps(snapshot.listed(self.page).to_json_dict()).encode()


class Feed:
    """See the module's docstring. For one event loop.

    Args:
        name, namespace, uid: of the run.
        clock: now, with a time zone.
        ages: how old the page and its parts may be.
    """

    def __init__(
        self,
        thread: CoreThread[ServedCore],
        reader: RunReader,
        journal: Journal,
        signal: ChangeSignal,
        *,
        name: str,
        namespace: str,
        uid: str,
        lease_held: Callable[[], bool],
        clock: Callable[[], datetime],
        ages: MaxAges = AGES,
    ) -> None:
        self._thread = thread
        self._reader = reader
        self._journal = journal
        self._signal = signal
        self._identity = Identity(name, namespace, uid, journal.since)
        self._lease_held = lease_held
        self._clock = clock
        self._ages = ages
        self._lock = asyncio.Lock()
        self._shown: RenderedPage | None = None
        self._made_at = 0.0
        self._event: tuple[int, bytes] | None = None
        self._streams = 0
        self._status: Mapping[str, Any] = {}
        self._view: CoreView | None = None
        self._revision: int | None = None
        self._committed: list[SavePoint] = []
        self._claims: list[Claim] = []
        self._claims_at = 0.0

    async def shown(self) -> RenderedPage:
        """The page, at most a second old. What cannot be had stays as it was, and is said."""
        async with self._lock:
            before = self._shown
            if before is not None and time.monotonic() - self._made_at < self._ages.page:
                return before
            page = await self._look()
            changed = before is None or not snapshot.same(before.page, page)
            version = (before.version if before is not None else 0) + changed
            self._shown = RenderedPage(version, page)
            self._made_at = time.monotonic()
            return self._shown

    async def stream(self) -> AsyncGenerator[bytes]:
        """Server-sent events: the parts of the page whenever it says something else.

        Raises:
            TooManyStreamsError: at the first step.
        """
        if self._streams >= MOST_STREAMS:
            raise TooManyStreamsError(
                f"{MOST_STREAMS} pages are live already: close one, or reload this one now and then"
            )
        self._streams += 1
        try:
            yield b"retry: 3000\n\n"
            sent, end = -1, time.monotonic() + STREAM_SECONDS
            heard = time.monotonic()
            while not self._signal.closing and time.monotonic() < end:
                shown = await self.shown()
                if shown.version != sent:
                    sent, heard = shown.version, time.monotonic()
                    yield self._as_event(shown)
                elif time.monotonic() - heard > _KEEPALIVE_SECONDS:
                    heard = time.monotonic()
                    yield b": still here\n\n"
                await asyncio.sleep(self._ages.page)
        finally:
            self._streams -= 1

    def _as_event(self, shown: RenderedPage) -> bytes:
        if self._event is None or self._event[0] != shown.version:
            page = shown.page
            message = {
                "now": int(page.time.timestamp()),
                "title": f"{page.run} · {page.phase}",
                "parts": sections.all_sections(page),
            }
            self._event = (shown.version, f"data: {json.dumps(message)}\n\n".encode())
        return self._event[1]

    async def _look(self) -> RunPage:
        problem = await self._look_at_core()
        problem = await self._look_at_run() or problem
        sources = Sources(
            status=self._status,
            view=self._view,
            committed=self._committed,
            witnessed=self._journal.saves(),
            claims=self._claims,
            news=self._journal.news(),
            problem=problem,
        )
        return snapshot.build(self._identity, sources, self._clock())

    async def _look_at_core(self) -> str | None:
        if not self._thread.alive:
            return f"The monitor's core failed, and the monitor ends: {self._thread.failure}"
        try:
            async with asyncio.timeout(_CORE_SECONDS):
                await self._read_core()
        except TimeoutError:
            return f"The monitor has been busy for {_CORE_SECONDS:g} s: what you see is older."
        except MonitorError as error:
            return f"The monitor cannot say more now: {error}"
        if not self._lease_held():
            return "This monitor does not hold the run's Lease: another one may be at work."
        if not self._thread.ready:
            return "The monitor is still reading the checkpoints."
        return None

    async def _read_core(self) -> None:
        view, revision = await self._ask(lambda core: (core.view(), core.revision))
        # At once: amid what follows, the journal may be shown a newer view by the status writer.
        self._journal.see(view)
        if revision != self._revision:  # thousands of saves are copied only when there are new ones
            committed = await self._ask(lambda core: core.committed())
            self._committed = [save_point(kind, info) for kind, info in committed]
            self._revision = revision
        # These are on the volume. A run of several clusters has several in one attempt.
        before = self._view.attempt if self._view is not None else None
        if before != view.attempt or time.monotonic() - self._claims_at > self._ages.claims:
            self._claims = await self._ask(lambda core: core.claims())
            self._claims_at = time.monotonic()
        self._view = view

    async def _ask(self, call: Callable[[ServedCore], Any]) -> Any:
        return await asyncio.wrap_future(self._thread.submit(call))

    async def _look_at_run(self) -> str | None:
        try:
            async with asyncio.timeout(_RUN_SECONDS):
                self._status = (await self._reader.facts(self._ages.run)).status
        except TimeoutError:
            return "The API server is slow: phase and conditions are older."
        except StaleRunError as error:
            return f"This monitor ends: {error}."
        except MonitorError as error:
            return f"Phase and conditions cannot be had: {error}."
        return None
