"""One trial's API server, monitor processes and job, and its client: HTTP, with failover."""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from trainsync.api.protocol import (
    FailureReport,
    ReceiptHint,
    ResumePoint,
    SaveKind,
    SaveRequest,
    SaveState,
    SaveStatus,
)
from trainsync.monitor.client.http import HttpMonitorClient, HttpSettings
from trainsync.monitor.client.retry import RetryPolicy
from trainsync.monitor.errors import MonitorUnavailableError, NotReadyError

from tests.faults.kube import CLUSTER, FileApi, Place, serve, write_token
from tests.faults.obeying import Faulty, obey
from tests.faults.plan import Plan
from tests.faults.processes import SECONDS, Child, Line
from tests.faults.training import Placed, Trainer, Where
from tests.faults.trial import Trial
from tests.unit.monitor.fakes import UID

ResultT = TypeVar("ResultT")


def client_of(place: Place, where: Placed, token_file: Path) -> HttpMonitorClient:
    """A client with short timeouts."""
    quick = RetryPolicy(attempts=2, deadline_seconds=1.0, first_wait_seconds=0.02)
    return HttpMonitorClient(
        f"http://127.0.0.1:{place.port}",
        attempt=where.owner.attempt,
        incarnation=where.owner.incarnation,
        token_file=token_file,
        settings=HttpSettings(
            connect_seconds=0.5,
            read_seconds=1.0,
            claim_read_seconds=10.0,
            retry=quick,
            claim_retry=RetryPolicy(
                attempts=50, deadline_seconds=SECONDS, longest_wait_seconds=0.1
            ),
        ),
    )


class FailoverClient:
    """Asks the monitor that answered last, then the others, like a Service that routes to the ready
    pod.

    `cut` disconnects the client permanently.
    """

    def __init__(self, clients: Sequence[HttpMonitorClient]) -> None:
        self._clients = list(clients)
        self._is_cut = False
        self.attempt = clients[0].attempt
        self.incarnation = clients[0].incarnation

    def cut(self) -> None:
        """Cut the network permanently: no monitor is reached."""
        self._is_cut = True

    def claim(self, cluster: str) -> None:
        """See `MonitorClient`."""
        self._ask(lambda client: client.claim(cluster))

    def register(self, request: SaveRequest) -> SaveStatus:
        """See `MonitorClient`."""
        return self._ask(lambda client: client.register(request))

    def receipt(self, hint: ReceiptHint) -> None:
        """See `MonitorClient`."""
        self._ask(lambda client: client.receipt(hint))

    def failure(self, report: FailureReport) -> None:
        """See `MonitorClient`."""
        self._ask(lambda client: client.failure(report))

    def save_status(self, kind: SaveKind, step: int, wait_seconds: float = 0.0) -> SaveStatus:
        """See `MonitorClient`; polls with short waits, so that a hung monitor does not block the
        call."""
        end = time.monotonic() + wait_seconds
        while True:
            status = self._ask(lambda client: client.save_status(kind, step, 0.3))
            ended = status.state in (SaveState.COMMITTED, SaveState.ABORTED)
            if ended or time.monotonic() >= end:
                return status

    def resume(self) -> ResumePoint | None:
        """See `MonitorClient`."""
        return self._ask(lambda client: client.resume())

    def close(self) -> None:
        """See `MonitorClient`."""
        for client in self._clients:
            client.close()

    def _ask(self, call: Callable[[HttpMonitorClient], ResultT]) -> ResultT:
        end = time.monotonic() + (0 if self._is_cut else SECONDS)
        while True:
            try:
                if self._is_cut:
                    raise MonitorUnavailableError("the network is cut")
                return call(self._clients[0])
            except (MonitorUnavailableError, NotReadyError):
                if time.monotonic() >= end:
                    raise
            self._clients.append(self._clients.pop(0))
            time.sleep(0.02)  # polling interval


def _ranks(
    line: Line, where: Where, plan: Plan, places: Sequence[Place], token: Path, faulty: Faulty
) -> None:
    """A whole job, which asks whichever monitor is ready."""
    faulty.build_in()
    client = FailoverClient([client_of(place, where, token) for place in places])
    client.claim(CLUSTER)
    trainer = Trainer(where, plan, client, range(plan.ranks))  # type: ignore[arg-type]
    obey(line, trainer, faulty)


class Cluster:
    """The API server's files and the monitor processes of one trial."""

    def __init__(self, trial: Trial, plan: Plan) -> None:
        self._trial = trial
        self._plan = plan
        trial.uid = UID
        self._directory = trial.directory / "api"
        self.api = FileApi.create(self._directory)
        self.token = write_token(trial.directory)
        self.where = trial.attempt(plan)

    def monitor(self, place: Place, phase: Callable[[str], None] = lambda _: None) -> Child:
        """A monitor process; the first one that is ready holds the Lease."""
        return self._trial.child(
            place.identity, serve, place, self.where, self._plan, self._directory, phase
        )

    def job(self, places: Sequence[Place], faulty: Faulty | None = None) -> Child:
        """The first attempt, with its history committed."""
        child = self._trial.child(
            "job", _ranks, self.where, self._plan, places, self.token, faulty or Faulty()
        )
        child.expect("history")
        return child
