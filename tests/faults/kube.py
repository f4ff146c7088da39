"""The real monitor process over HTTP, with a fake API server in files shared by monitors."""

import asyncio
import fcntl
import http.client
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

from trainsync import failpoints
from trainsync.api.spec import LogLevel
from trainsync.api.status import Phase, StopRequest, StopSave
from trainsync.kube import lease as lease_lock
from trainsync.kube.client import KubeError, Object
from trainsync.monitor.kube import lease
from trainsync.monitor.server import app, status
from trainsync.monitor.server.settings import MonitorServerSettings

from tests.faults.inject import stop_me
from tests.faults.plan import Plan
from tests.faults.processes import SECONDS, BrokenError, Line
from tests.faults.training import Placed
from tests.ports import port_of, reserved_port
from tests.unit.monitor.fakes import ISSUER, NAMESPACE, UID, Signer

ResultT = TypeVar("ResultT")

CLUSTER: Final = "main"
SIGNER: Final = Signer()
"""Made once: making a key takes as long as a whole trial."""

# Production's times divided by fifteen: a monitor gives up before a successor may start.
_LEASE_SECONDS: Final = 1
_GIVE_UP_SECONDS: Final = 0.6
_RENEW_SECONDS: Final = 0.1
_STATUS_SECONDS: Final = 0.13


_TURN: Final = threading.Lock()


def stop_monitor() -> None:
    """SIGSTOP this process, but not while it holds the fake API server's file lock."""
    with _TURN:
        stop_me()


class FileApi:
    """`KubeApi` of one run, stored in a directory; several processes may share the directory.

    Args:
        identity: the client's name, for `cut`.
    """

    def __init__(self, directory: Path, identity: str) -> None:
        self._directory = directory
        self._cut = directory / f"cut-{identity}"

    @classmethod
    def create(cls, directory: Path) -> "FileApi":
        """An API server with a run at attempt 0."""
        directory.mkdir()
        api = cls(directory, "conductor")
        api.set_attempt(0)
        return api

    def set_attempt(self, attempt: int) -> None:
        """Set the attempt, as the operator does to start the next job in the same pods."""
        clusters = [{"name": CLUSTER, "attempt": 0}]
        run = {
            "metadata": {"uid": UID, "generation": 1},
            "status": {"attempt": attempt, "clusters": clusters},
        }
        with self._locked():
            self._write("run", run)

    def ask_to_stop(self, request: StopRequest | None) -> None:
        """Ask for a save before the pods go, as the operator does; None withdraws the request."""
        with self._locked():
            run = self._read("run") or {}
            status = {key: value for key, value in run["status"].items() if key != "stopping"}
            if request is not None:
                status["stopping"] = request.to_json_dict()
            self._write("run", {**run, "status": {**status, "phase": Phase.RUNNING.value}})

    def stop_save(self) -> StopSave | None:
        """The monitor's answer in the run's status, as the operator reads it."""
        with self._locked():
            found = ((self._read("applied") or {}).get("checkpoint") or {}).get("stopSave")
        return None if found is None else StopSave.model_validate(found)

    def cut(self, identity: str) -> None:
        """Refuse all calls of clients with this name from now on."""
        (self._directory / f"cut-{identity}").touch()

    async def get_run(self) -> Object:
        self._check()
        with self._locked():
            run: Object = self._read("run") or {}
            return {**run, "status": {**(self._read("applied") or {}), **run.get("status", {})}}

    async def apply_status(self, uid: str, status: Object) -> Object:
        self._check()
        del uid
        with self._locked():
            self._write("applied", status)
        return await self.get_run()

    async def get_lease(self) -> Object | None:
        self._check()
        with self._locked():
            return self._read("lease")

    async def create_lease(self, lease: Object) -> Object:
        self._check()
        with self._locked():
            if self._read("lease") is not None:
                raise KubeError(409, "exists")
            metadata = {**lease["metadata"], "resourceVersion": "1"}
            return self._write("lease", {**lease, "metadata": metadata})

    async def replace_lease(self, lease: Object) -> Object:
        self._check()
        with self._locked():
            there = self._read("lease")
            assert there is not None
            version = there["metadata"]["resourceVersion"]
            if lease["metadata"].get("resourceVersion") != version:
                raise KubeError(409, "the object has been modified")
            metadata = {**lease["metadata"], "resourceVersion": str(int(version) + 1)}
            return self._write("lease", {**lease, "metadata": metadata})

    async def create_event(self, event: Object) -> None:
        self._check()
        del event

    async def token_keys(self) -> tuple[str, Object]:
        self._check()
        return ISSUER, SIGNER.jwks()

    def _check(self) -> None:
        if self._cut.exists():
            raise KubeError(None, "no route to the API server")

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with _TURN, (self._directory / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _read(self, name: str) -> Object | None:
        try:
            found: Object = json.loads((self._directory / f"{name}.json").read_text())
        except FileNotFoundError:
            return None
        return found

    def _write(self, name: str, value: Object) -> Object:
        path = self._directory / f"{name}.json"
        path.with_suffix(".tmp").write_text(json.dumps(value))
        path.with_suffix(".tmp").replace(path)
        return value


@dataclass(frozen=True)
class Place:
    """One monitor pod: its name and address."""

    identity: str
    port: int
    reservation: socket.socket = field(compare=False, repr=False)
    """A socket that reserves the port, so that parallel trials do not share it."""

    @classmethod
    def choose(cls, identity: str) -> "Place":
        """A place with its own port, reserved while the object exists."""
        reservation = reserved_port()
        return cls(identity, port_of(reservation), reservation)

    @property
    def ready(self) -> bool | None:
        """The answer of /readyz; None without an answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=0.5)
        try:
            connection.request("GET", "/readyz")
            return connection.getresponse().status == 200
        except OSError:
            return None
        finally:
            connection.close()

    def wait_ready(self, look: Callable[[], None], seconds: float = SECONDS) -> None:
        """Wait until the monitor holds the Lease and has read the disk."""
        end = time.monotonic() + seconds
        while not self.ready:
            look()
            if time.monotonic() > end:
                raise BrokenError(f"{self.identity} was not ready within {seconds:g} s")
            time.sleep(0.02)


def serve(
    line: Line,
    place: Place,
    where: Placed,
    plan: Plan,
    api_directory: Path,
    phase: Callable[[str], None] = lambda _: None,
) -> None:
    """The monitor's own `serve` with its SIGTERM handling, but with the fake API server; the run is
    in a directory, or in the store of a URL."""
    del line
    lease_lock.LEASE_SECONDS = _LEASE_SECONDS  # type: ignore[misc]
    lease.GIVE_UP_SECONDS = _GIVE_UP_SECONDS  # type: ignore[misc]
    lease.RENEW_SECONDS = _RENEW_SECONDS  # type: ignore[misc]
    lease.LOOK_SECONDS = _RENEW_SECONDS  # type: ignore[misc]
    status.SHORTEST_INTERVAL = _STATUS_SECONDS  # type: ignore[misc]
    process_module: Any = app
    process_module.connect = _connect
    process_module.ClusterApi = lambda *_, **__: FileApi(api_directory, place.identity)
    failpoints.enable(failpoints.COMMIT, phase)
    settings = MonitorServerSettings(
        run_name="run",
        namespace=NAMESPACE,
        run_uid=UID,
        directory=where.place if isinstance(where.place, Path) else None,
        store=where.place if isinstance(where.place, str) else None,
        max_to_keep=plan.keep,
        verify=plan.verify,
        lag_allowed=1,
        log_level=LogLevel.INFO,
        identity=place.identity,
        port=place.port,
    )
    raise SystemExit(asyncio.run(app.serve(settings)))


def write_token(directory: Path) -> Path:
    """Write the token file that the kubelet would project."""
    path = directory / "token"
    path.write_text(SIGNER.token())
    return path


@asynccontextmanager
async def _connection() -> AsyncIterator[None]:
    yield None


async def _connect() -> Any:
    return _connection()
