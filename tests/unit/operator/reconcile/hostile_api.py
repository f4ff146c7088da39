"""An API server in memory that breaks as a real one does, while the world moves between calls."""

from collections import deque
from collections.abc import Callable, Coroutine
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, Final, TypeVar

from trainsync.api import names
from trainsync.api.base import format_time
from trainsync_operator.kube import objects
from trainsync_operator.kube.client import ApiError, ApiRefusedError
from trainsync_operator.kube.kinds import CHILDREN, POD, RAY_CLUSTER, RAY_JOB, RUN, Kind
from trainsync_operator.kube.objects import Object

from tests.unit.operator.fake_api import Crash, FakeApi, copied

Answer = TypeVar("Answer")
_ENDED: Final = {"FAILED", "SUCCEEDED", "STOPPED"}
RETRY_AFTER: Final = 7.0
_KEPT: Final = 8
TYPO: Final = "ray: 1"
"""An image of which the API server refuses the pods."""


class Fault(StrEnum):
    """How one call goes wrong."""

    CONFLICT = "409"
    THROTTLED = "429 with Retry-After"
    SLOW = "the answer takes half a second"
    LATE = "the operator gives up waiting, and a write takes effect later"
    BROKEN = "500"
    ANSWER_LOST = "the call takes effect, and its answer is lost"
    STALE_RUN = "the run is read as it was some changes ago"
    CRASH_BEFORE = "the operator dies before the call"
    CRASH_AFTER = "the operator dies after the call"


class HostileApi(FakeApi):
    """A `FakeApi` whose n-th call since `arm` goes wrong, or comes after a change of the world.

    It also watches over what no reader could see afterwards: an attempt that begins beside another,
    and a status that was meant for another run, or for an earlier state of it.

    Attributes:
        calls: since `arm`.
        beside: a sentence for each attempt that began while another one ran.
        misplaced: a sentence for each status that reached a run it was not decided on.
        quota_is_used_up: new children are refused, in other words each time.
        job_answers_are_lost: jobs are made, and nothing is heard of it.
        called: called after each call, and after each change of the world between two of them.
        wait: lets half a second pass.
        requests: the times of all calls.
        hasty: a sentence for each call that came before the time that the API server asked for.
    """

    def __init__(self, clock: Callable[[], datetime]) -> None:
        super().__init__(clock)
        self.calls = 0
        self.beside: list[str] = []
        self.misplaced: list[str] = []
        self.quota_is_used_up = False
        self.job_answers_are_lost = False
        self.called: Callable[[], None] = lambda: None
        self.wait: Callable[[], None] = lambda: None
        self.requests: deque[datetime] = deque()
        self.hasty: list[str] = []
        self._not_before: datetime | None = None
        self._throttled_at = clock()
        self._late: deque[Coroutine[Any, Any, Any]] = deque()
        self._lands = False
        self._faults: dict[int, Fault] = {}
        self._moves: dict[int, Callable[[], None]] = {}
        self._runs: list[Object] = []  # the last ones
        self._request = 0
        self._decided_on: Object | None = None
        self._status_was_refused = False

    def arm(
        self,
        faults: dict[int, Fault] | None = None,
        moves: dict[int, Callable[[], None]] | None = None,
    ) -> None:
        """What happens at which of the calls from now on."""
        self._faults, self._moves, self.calls = dict(faults or {}), dict(moves or {}), 0

    def put(self, kind: Kind, obj: Object) -> Object:
        made = super().put(kind, obj)
        if kind is RUN:
            self._runs = [*self._runs, copied(made)][-_KEPT:]
        return made

    async def _through(self, call: Coroutine[Any, Any, Answer], *, writes: bool = True) -> Answer:
        number, self.calls = self.calls, self.calls + 1
        self._request += 1
        fault = self._faults.get(number)
        self._asked(writes=writes)
        if number in self._moves:
            self._moves[number]()
            self.called()
        try:
            if fault is Fault.CRASH_BEFORE:
                raise Crash
            if fault is Fault.CONFLICT and writes:
                raise ApiRefusedError(409, "the object has been modified")
            if fault is Fault.THROTTLED:
                raise self._throttled()
            if fault is Fault.SLOW:
                self.wait()
            if fault is Fault.LATE and writes:
                self._late.append(call)
                raise ApiError("API server not reached: TimeoutError")
            if fault is Fault.BROKEN:
                raise ApiError("API server answered 500: etcdserver: request timed out")
            answer = await call
        finally:
            if not any(call is late for late in self._late):
                call.close()
            self.called()
        if fault is Fault.CRASH_AFTER:
            raise Crash
        if fault in (Fault.ANSWER_LOST, Fault.LATE):
            raise ApiError("API server not reached: TimeoutError")
        return answer

    def _asked(self, *, writes: bool) -> None:
        now = self.clock()
        self.requests.append(now)
        if self._not_before is None or now >= self._not_before:
            return
        # Reads of the same moment may have been on their way already.
        if writes or now > self._throttled_at:
            self.hasty.append(f"asked at {now:%T}, and not from {self._not_before:%T} on")

    def _throttled(self) -> ApiError:
        self._throttled_at = self.clock()
        self._not_before = self._throttled_at + timedelta(seconds=RETRY_AFTER)
        error = ApiError("API server answered 429: too many requests")
        error.retry_after = RETRY_AFTER
        return error

    def of_a_new_process(self) -> None:
        """Who calls knows nothing of what was asked of the one before."""
        self._not_before = None

    @property
    def owes(self) -> bool:
        """Whether there is a write of which nothing was heard, and which has no effect yet."""
        return bool(self._late)

    def land(self) -> None:
        """The oldest such write takes effect, if there is one."""
        if not self._late:
            return
        self._lands = True
        try:
            self._late.popleft().send(None)
        except (StopIteration, ApiError):
            self.called()
        finally:
            self._lands = False

    async def get(self, kind: Kind, namespace: str, name: str) -> Object | None:
        stale = kind is RUN and self._faults.get(self.calls) is Fault.STALE_RUN
        found = await self._through(super().get(kind, namespace, name), writes=False)
        if stale and found is not None:
            found = copied(self._runs[0])
        if kind is RUN:
            # After a refusal the operator only looks whether its decision still holds.
            if not self._status_was_refused:
                self._decided_on = found
            self._status_was_refused = False
        return found

    async def list(
        self, kind: Kind, namespace: str | None, selector: str = "", limit: int | None = None
    ) -> list[Object]:
        return await self._through(super().list(kind, namespace, selector, limit), writes=False)

    async def apply(self, kind: Kind, obj: Object) -> Object:
        return await self._through(self._apply(kind, copied(obj)))

    async def try_apply(self, kind: Kind, obj: Object) -> None:
        await self._through(self._try_apply(kind, obj))

    async def _try_apply(self, kind: Kind, obj: Object) -> None:
        self._admit(kind, obj, await super().get(kind, "team", objects.name(obj)))

    def _admit(self, kind: Kind, obj: Object, before: Object | None) -> None:
        if kind is RAY_CLUSTER and TYPO in str(obj["spec"]):
            raise ApiRefusedError(422, f"spec is invalid (request {self._request})")
        if before is None and self.quota_is_used_up:
            raise ApiRefusedError(403, f"exceeded quota (request {self._request})")

    async def _apply(self, kind: Kind, obj: Object) -> Object:
        before = await super().get(kind, obj["metadata"]["namespace"], objects.name(obj))
        self._admit(kind, obj, before)
        applied = await super().apply(kind, obj)
        if kind is RAY_JOB:
            if before is None:
                self._begun(obj)
            if self.job_answers_are_lost:
                raise ApiError("API server not reached: TimeoutError")
        return applied

    async def apply_status(self, kind: Kind, obj: Object) -> Object:
        try:
            write = self._apply_status(kind, copied(obj), self._decided_on)
            return await self._through(write)
        except ApiRefusedError:
            self._status_was_refused = True
            raise

    async def _apply_status(self, kind: Kind, obj: Object, read: Object | None) -> Object:
        # A copy: the object itself is written to.
        live = await super().get(kind, obj["metadata"]["namespace"], objects.name(obj))
        written = await super().apply_status(kind, obj)
        if live is not None:
            self._placed(live, read)
        if not self._lands:
            self._decided_on = copied(written)  # what comes next is decided on the answer
        return written

    def _placed(self, live: Object, read: Object | None) -> None:
        if read is not None and _fenced(read) != _fenced(live):
            self.misplaced.append(f"decided on {_fenced(read)}, written to {_fenced(live)}")

    def begin_look(self, stored: Object | None = None) -> None:
        """The operator reads anew what it decides on: the ``stored`` run, or that of the API."""
        self._decided_on, self._status_was_refused = stored, False

    async def create(self, kind: Kind, obj: Object) -> Object:
        return await self._through(super().create(kind, copied(obj)))

    async def delete(
        self, kind: Kind, namespace: str, name: str, uid: str, *, after_all: bool = False
    ) -> None:
        await self._through(self._delete(kind, namespace, name, uid))

    async def _delete(self, kind: Kind, namespace: str, name: str, uid: str) -> None:
        if kind is not RAY_JOB:
            await super().delete(kind, namespace, name, uid)
            return
        # KubeRay has a finalizer on jobs: they go when their driver has stopped.
        live = self.objects.get((kind, namespace, name))
        if live is not None and live["metadata"]["uid"] == uid:
            live["metadata"].setdefault("deletionTimestamp", format_time(self.clock()))
            self.put(kind, live)
            self.writes.append(("delete", kind, name))

    def stop_jobs(self) -> None:
        """Jobs that are being deleted have stopped, and go."""
        for job in self.all(RAY_JOB):
            if objects.being_deleted(job):
                self.remove(RAY_JOB, objects.name(job))

    def collect_garbage(self) -> None:
        """What belongs to a run that is gone goes, also what was made for it a moment too late."""
        for kind in (*CHILDREN, POD):
            for child in self.all(kind):
                if not self._lives(child):
                    self.remove(kind, objects.name(child))

    def _lives(self, child: Object) -> bool:
        uids = {other["metadata"]["uid"] for other in self.objects.values()}
        owners = child["metadata"].get("ownerReferences") or []
        return not owners or any(owner["uid"] in uids for owner in owners)

    def _begun(self, job: Object) -> None:
        if not self._lives(job):
            return
        attempt = objects.labels(job)[names.LABEL_ATTEMPT]
        for other in self.all(RAY_JOB):
            status: dict[str, Any] = other.get("status") or {}
            # One that lands late is refused by the run's monitor, and is to be deleted.
            if (
                not self._lands
                and objects.labels(other)[names.LABEL_ATTEMPT] != attempt
                and status.get("jobStatus") not in _ENDED
                and self._lives(other)
            ):
                self.beside.append(f"attempt {attempt} began beside {objects.name(other)}")


def _fenced(run: Object) -> tuple[Any, ...]:
    """What no status may be written over unseen: the run, its spec and the operator's own part."""
    meta, status = run["metadata"], objects.status(run)
    mine = [status.get(key) for key in ("phase", "attempt", "restarts", "infrastructureRestarts")]
    return meta["uid"], meta["generation"], *mine
