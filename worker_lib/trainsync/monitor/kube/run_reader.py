"""Reads the monitor's TrainingRun from the API server, and keeps it briefly."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from pydantic import ValidationError

from trainsync.api.pods import gpus_of_containers
from trainsync.api.spec import ResumeFrom, Role
from trainsync.api.status import Phase, RolePods, StopRequest
from trainsync.kube.client import KubeError
from trainsync.monitor.errors import NotReadyError
from trainsync.monitor.kube.client import KubeApi

_LOG = logging.getLogger(__name__)
_SHORTEST_AGE: Final = 1.0
# How often the run is looked at, without requests too.
_WATCH_SECONDS: Final = 5.0
_REST_SECONDS: Final = 30.0
_AT_REST: Final = (Phase.PENDING, Phase.SUSPENDED, Phase.COMPLETE, Phase.FAILED)


class StaleRunError(Exception):
    """The run is gone, or another one has its name: this monitor must end."""


@dataclass(frozen=True)
class RunFacts:
    """Facts of a TrainingRun.

    ``generations`` holds, for each cluster, the attempt that made its present RayCluster; ``gpus``
    is how many the pods of spec ask for; ``resume_from`` is ``spec.resumeFrom``; ``pods`` are the
    Ray pods that the operator sees, None of an older operator.
    """

    attempt: int
    generations: Mapping[str, int]
    status: Mapping[str, Any]
    stopping: StopRequest | None = None
    gpus: float = 0.0
    resume_from: ResumeFrom | None = None
    pods: Mapping[Role, RolePods] | None = None

    @property
    def phase(self) -> str | None:
        """The run's phase, as the operator says it."""
        return self.status.get("phase")


def gpus_of(spec: Mapping[str, Any]) -> float:
    """The GPUs that all pods of a run ask for."""

    def of(template: Mapping[str, Any] | None) -> float:
        return gpus_of_containers((template or {}).get("spec"))

    total = 0.0
    for cluster in spec.get("clusters") or []:
        total += of((cluster.get("head") or {}).get("template"))
        for group in cluster.get("groups") or []:
            count = group.get("replicas", 1)
            if group.get("role") == Role.EXPLORER:
                count = spec.get("explorerReplicas", count)
            total += int(count) * of(group.get("template"))
    return total


def _stopping(status: Mapping[str, Any]) -> StopRequest | None:
    try:
        found = status.get("stopping")
        return None if found is None else StopRequest.model_validate(found, extra="ignore")
    except ValidationError as error:  # of a newer operator
        _LOG.warning("status.stopping is not understood: %s", error)
        return None


def _pods(status: Mapping[str, Any]) -> Mapping[Role, RolePods] | None:
    if (listed := status.get("pods")) is None:
        return None
    try:
        found = [RolePods.model_validate(entry, extra="ignore") for entry in listed]
        return {Role(entry.role): entry for entry in found}
    except (ValidationError, ValueError) as error:  # of a newer operator
        _LOG.warning("status.pods is not understood: %s", error)
        return None


def _resume_from(spec: Mapping[str, Any]) -> ResumeFrom | None:
    try:
        found = spec.get("resumeFrom")
        return None if found is None else ResumeFrom.model_validate(found, extra="ignore")
    except ValidationError as error:  # of a newer resource
        _LOG.warning("spec.resumeFrom is not understood: %s", error)
        return None


def parse_run(run: Mapping[str, Any], uid: str) -> RunFacts:
    """Facts from the object.

    Raises:
        StaleRunError: the object is another run.
    """
    found = run.get("metadata", {}).get("uid")
    if found != uid:
        raise StaleRunError(f"the run has uid {found}, this monitor is of {uid}")
    status = run.get("status") or {}
    return RunFacts(
        attempt=int(status.get("attempt") or 0),
        generations={c["name"]: int(c["attempt"]) for c in status.get("clusters") or []},
        status=status,
        stopping=_stopping(status),
        gpus=gpus_of(run.get("spec") or {}),
        resume_from=_resume_from(run.get("spec") or {}),
        pods=_pods(status),
    )


class RunReader:
    """Reads the run; callers say how old the answer may be.

    Args:
        on_read: told of all facts that are read.
    """

    def __init__(
        self,
        api: KubeApi,
        uid: str,
        clock: Callable[[], float] = time.monotonic,
        on_read: Callable[[RunFacts], None] = lambda _: None,
    ) -> None:
        self._api = api
        self._on_read = on_read
        self._uid = uid
        self._clock = clock
        self._facts: RunFacts | None = None
        self._read_at = 0.0
        self._lock = asyncio.Lock()
        self._stale: StaleRunError | None = None
        self._gone = asyncio.Event()

    async def facts(self, max_age_seconds: float) -> RunFacts:
        """Facts at most so old (one second is the least, however many callers ask).

        When the API server does not answer, older facts are given if there are any: fencing by
        claims does not depend on them.

        Raises:
            NotReadyError: nothing is known yet.
            StaleRunError: the run is not ours any more.
        """
        age = max(max_age_seconds, _SHORTEST_AGE)
        async with self._lock:
            if self._stale is not None:
                raise self._stale
            if self._facts is not None and self._clock() - self._read_at < age:
                return self._facts
            try:
                return await self._read()
            except KubeError as error:
                if self._facts is None:
                    raise NotReadyError(f"the run cannot be read: {error}") from error
                _LOG.warning("the run cannot be read, older facts are used: %s", error)
                return self._facts

    async def confirmed(self) -> RunFacts:
        """Facts read now, never kept ones: what a claim is judged by.

        Raises:
            NotReadyError: the API server does not answer.
            StaleRunError: the run is not ours any more.
        """
        async with self._lock:
            try:
                return await self._read()
            except KubeError as error:
                raise NotReadyError(f"the run cannot be read: {error}") from error

    async def watch(
        self,
        tell: Callable[[RunFacts], Awaitable[None]],
        watch_seconds: float = _WATCH_SECONDS,
        rest_seconds: float = _REST_SECONDS,
    ) -> None:
        """Look at the run now and then, also without requests, and tell what was seen.

        Args:
            watch_seconds: between two looks at a run that has pods.
            rest_seconds: how old the answer of a look at another may be.

        Raises:
            StaleRunError: as soon as any request met it.
        """
        while True:
            try:
                async with asyncio.timeout(watch_seconds):
                    await self._gone.wait()
            except TimeoutError:
                pass
            try:
                at_rest = self._facts is not None and self._facts.status.get("phase") in _AT_REST
                await tell(await self.facts(rest_seconds if at_rest else watch_seconds / 2))
            except NotReadyError as error:
                _LOG.warning("%s", error)

    async def _read(self) -> RunFacts:
        asked_at = self._clock()
        try:
            self._facts = parse_run(await self._api.get_run(), self._uid)
        except KubeError as error:
            if error.status == 404:
                raise self._end(StaleRunError("the run is deleted")) from error
            raise
        except StaleRunError as error:
            raise self._end(error) from None
        self._read_at = asked_at
        self._on_read(self._facts)
        return self._facts

    def saw(self, run: Mapping[str, Any]) -> None:
        """Take the API server's answer to a write as a read of the run."""
        try:
            facts = parse_run(run, self._uid)
        except StaleRunError as error:
            self._end(error)
            return
        self._facts, self._read_at = facts, self._clock()
        self._on_read(facts)

    def _end(self, error: StaleRunError) -> StaleRunError:
        self._stale = error
        self._gone.set()
        return error
