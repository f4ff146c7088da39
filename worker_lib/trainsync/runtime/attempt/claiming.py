"""Joins an attempt: the one that another process has claimed, or one that is claimed here."""

import logging
import secrets
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol, TypeVar

from trainsync.monitor.client.base import MonitorClient
from trainsync.runtime import clients
from trainsync.runtime.attempt import spmd
from trainsync.runtime.attempt.rescued import await_rescued_before_claim
from trainsync.runtime.settings import RunSettings
from trainsync.storage.hosting import Hosting

logger = logging.getLogger(__name__)


class Claiming(Protocol):
    """The calls of a `RunContext` that claims its attempt."""

    @property
    def attempt(self) -> int:
        """Number of the attempt."""
        ...

    @property
    def incarnation(self) -> str:
        """Random name of the process that claims it."""
        ...

    @property
    def monitor(self) -> MonitorClient:
        """The client that claims."""
        ...

    def close(self) -> None:
        """Let go of the monitor, and let others host the run."""
        ...


ContextT = TypeVar("ContextT", bound=Claiming)
MakeContext = Callable[[RunSettings, bool, Hosting | None], ContextT]
"""Makes a context of settings with an attempt and an incarnation; see `RunContext.__init__`."""


def join(
    make: MakeContext[ContextT], settings: RunSettings, environ: Mapping[str, str]
) -> ContextT:
    """See `RunContext.from_env`, whose environment says ``settings``."""
    if settings.incarnation is not None:
        return make(settings, False, None)
    if not spmd.is_spmd(environ):
        return _claim(make, settings)
    made: list[ContextT] = []

    def claim() -> spmd.Identity:
        made.append(_claim(make, settings))
        return made[0].attempt, made[0].incarnation

    (attempt, incarnation), _ = spmd.claim_once(claim)
    if made:
        return made[0]
    return make(replace(settings, attempt=attempt, incarnation=incarnation), False, None)


def _claim(make: MakeContext[ContextT], settings: RunSettings) -> ContextT:
    hosting = clients.host(settings) if settings.is_local else None
    await_rescued_before_claim(settings)
    given = settings.attempt
    attempt = clients.next_local_attempt(settings) if given is None else given
    settings = replace(settings, attempt=attempt, incarnation=secrets.token_hex(8))
    context = make(settings, True, hosting)
    try:
        context.monitor.claim(settings.cluster)
    except BaseException:
        context.close()
        raise
    level = logging.DEBUG if settings.is_local else logging.INFO  # its monitor says so, too
    done = "run %s: claimed attempt %d as %s"
    logger.log(level, done, settings.run, attempt, context.incarnation)
    return context
