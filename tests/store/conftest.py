"""The server, a bucket and a fault proxy for each test, and a run's directory to copy."""

import os
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from trainsync.storage.layout import RunDirectory
from trainsync.storage.objects.bucket import Limits, ObjectBucket
from trainsync.storage.objects.opening import StoreOptions, open_store

from devcluster.shell import Progress
from devcluster.tools import ensure_gcs, ensure_minio, ensure_store_servers
from tests.distributed.processes import ray_environment  # noqa: F401 - some tests import verl, and that Ray
from tests.store.servers import azurite, gcs, minio
from tests.store.servers.azurite import ACCOUNT, KEY, Azurite
from tests.store.servers.fault_proxy import FaultProxy
from tests.store.servers.gcs import Gcs
from tests.store.servers.server import ACCESS, REGION, SECRET, Server, request, serving
from tests.unit.cli.conftest import build, make_old

PROGRAM = "versitygw"
FAST = Limits(
    connect_seconds=2.0, call_seconds=10.0, retries=2, retry_seconds=5.0, part_bytes=5 << 20
)
"""Bounds that a test can wait for."""


def pytest_sessionstart(session: pytest.Session) -> None:
    """Build the servers before a test's time begins: the first time that takes minutes."""
    if not session.config.option.collectonly:
        ensure_store_servers(Progress())
        ensure_gcs(Progress())
        if os.environ.get("MINIO"):
            ensure_minio(Progress())


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    program = ensure_store_servers(Progress()).path(PROGRAM)
    with serving(program, tmp_path_factory.mktemp("store") / "data") as found:
        yield found


@pytest.fixture(scope="session")
def azure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Azurite]:
    environment = os.environ.get("AZURITE")
    if not environment:
        pytest.skip("AZURITE names no environment of azurite: `make test-store` makes one with npm")
    with azurite.serving(Path(environment), tmp_path_factory.mktemp("azure") / "server") as found:
        yield found


@pytest.fixture(scope="session")
def minio_port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    if not os.environ.get("MINIO"):
        pytest.skip("MinIO is built for `make test-store MINIO=1` alone")
    program = ensure_minio(Progress()).path("minio")
    with minio.serving(program, tmp_path_factory.mktemp("minio") / "server") as port:
        yield port


@pytest.fixture
def minio_bucket(minio_port: int) -> ObjectBucket:
    """A new bucket of MinIO."""
    name = f"bucket-{secrets.token_hex(6)}"
    request(minio_port, "PUT", f"/{name}")
    options = StoreOptions(
        endpoint=f"http://127.0.0.1:{minio_port}",
        region=REGION,
        allow_http=True,
        credentials={"access_key_id": ACCESS, "secret_access_key": SECRET},
        limits=FAST,
    )
    return open_store(f"s3://{name}/runs/a", options)


@pytest.fixture
def container(azure: Azurite, monkeypatch: pytest.MonkeyPatch) -> str:
    """URL of a new container; commands reach it by the environment."""
    name = f"container-{secrets.token_hex(6)}"
    azure.make_container(name)
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", azure.endpoint)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", ACCOUNT)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", KEY)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    return f"az://{name}"


@pytest.fixture(scope="session")
def google(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gcs]:
    program = ensure_gcs(Progress()).path("fake-gcs-server")
    with gcs.serving(program, tmp_path_factory.mktemp("gcs") / "server") as found:
        yield found


@pytest.fixture
def gcs_bucket(google: Gcs, monkeypatch: pytest.MonkeyPatch) -> str:
    """URL of a new bucket of GCS; commands reach it by the environment."""
    name = f"bucket-{secrets.token_hex(6)}"
    google.make_bucket(name)
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", gcs.account(google.endpoint))
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    return f"gs://{name}"


@dataclass(frozen=True)
class Place:
    """A bucket of one test: ``files`` has its objects, ``proxy`` is before it."""

    name: str
    files: Path
    proxy: FaultProxy
    direct: str
    """The server's own endpoint."""

    def url(self, prefix: str = "runs/a") -> str:
        return f"s3://{self.name}/{prefix}"

    def open(self, prefix: str = "runs/a", limits: Limits = FAST, **given: object) -> ObjectBucket:
        """The store, through the proxy."""
        credentials = {"access_key_id": ACCESS, "secret_access_key": SECRET}
        options = StoreOptions(
            endpoint=self.proxy.endpoint,
            region=REGION,
            allow_http=True,
            credentials=credentials,
            limits=limits,
        )
        return open_store(self.url(prefix), replace(options, **given))  # type: ignore[arg-type]

    def objects(self) -> list[str]:
        """Keys of all objects, read from the server's disk."""
        return sorted(
            path.relative_to(self.files).as_posix()
            for path in self.files.rglob("*")
            if path.is_file() and ".sgwtmp" not in path.parts
        )

    def parts_left(self) -> list[Path]:
        """What uploads that never ended have left on the server's disk."""
        return [path for path in (self.files / ".sgwtmp").rglob("*") if path.is_file()]


@pytest.fixture
def place(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """A new bucket; commands reach it through the proxy, by the environment."""
    name = f"bucket-{secrets.token_hex(6)}"
    files = server.bucket(name)
    with FaultProxy(server.port).running() as proxy:
        for key in ("AWS_SESSION_TOKEN", "AWS_ENDPOINT", "AWS_ENDPOINT_URL_S3", "AWS_PROFILE"):
            monkeypatch.delenv(key, raising=False)
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
        monkeypatch.setenv("AWS_REGION", REGION)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS)
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
        yield Place(name, files, proxy, server.endpoint)


@pytest.fixture(scope="session")
def healthy(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """Steps 10, 20 (with a state dict) and 30 of two ranks; tests must not change it."""
    run = build(tmp_path_factory.mktemp("healthy") / "run")
    make_old(run.root)
    return run


@pytest.fixture
def run(tmp_path: Path, healthy: RunDirectory) -> RunDirectory:
    shutil.copytree(healthy.root, tmp_path / "run")
    return RunDirectory(tmp_path / "run")
