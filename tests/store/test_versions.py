"""Buckets that keep older versions of objects, also such as nobody may remove (object lock)."""

import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from trainsync.monitor.client.store import StoreMonitorClient
from trainsync.monitor.core.core import CoreSettings
from trainsync.monitor.errors import StorageUnavailableError
from trainsync.storage.layout import RunDirectory
from trainsync.storage.objects.errors import (
    ConditionRefusedError,
    ObjectChangedError,
    ObjectExistsError,
)
from trainsync.storage.objects.opening import StoreOptions, open_store

from devcluster.shell import Progress
from devcluster.tools import ensure_store_servers
from tests.store.conftest import FAST, PROGRAM
from tests.store.servers.server import ACCESS, REGION, SECRET, Server, serving
from tests.unit.cli.commands import document, findings


@dataclass(frozen=True)
class Versioned:
    """A bucket; ``older`` has the versions that were replaced or removed."""

    url: str
    files: Path
    older: Path


@pytest.fixture(scope="module")
def keeping(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server whose buckets may keep versions."""
    program = ensure_store_servers(Progress()).path(PROGRAM)
    with serving(program, tmp_path_factory.mktemp("versions") / "data", versions=True) as found:
        yield found


@pytest.fixture(params=["versions", "locked"])
def versioned(
    keeping: Server, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Versioned:
    """A new bucket; commands reach it by the environment."""
    name = f"bucket-{secrets.token_hex(6)}"
    files = keeping.versioned_bucket(name, locked_days=1 if request.param == "locked" else 0)
    monkeypatch.setenv("AWS_ENDPOINT_URL", keeping.endpoint)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_REGION", REGION)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    return Versioned(f"s3://{name}/runs/a", files, keeping.root.with_name("versions") / name)


def test_conditional_puts_are_of_the_newest_version(versioned: Versioned) -> None:
    bucket = open_store(versioned.url, StoreOptions(limits=FAST))
    bucket.create("p", b"1")
    first = bucket.get("p")
    bucket.replace("p", b"2", first)
    with pytest.raises(ObjectChangedError):
        bucket.replace("p", b"3", first)
    with pytest.raises(ObjectExistsError):
        bucket.create("p", b"1")
    assert bucket.get("p").data == b"2"


def test_steps_are_copied_verified_and_pruned_and_older_versions_count_for_nothing(
    versioned: Versioned, run: RunDirectory, tmp_path: Path
) -> None:
    for step in (10, 20, 30):
        document("cp", run.root, versioned.url, "--step", step)
    assert findings("verify", versioned.url, code=0) == []
    document("prune", versioned.url, "--keep", 1, "--yes")
    steps = {save["step"] for save in document("ls", versioned.url)["saves"]}
    assert 10 not in steps
    assert 30 in steps
    # versitygw lists the folders of objects that were removed.
    assert {code for _, code, _ in findings("verify", versioned.url, code=0)} <= {"unlisted"}
    assert (versioned.files / "runs/a/latest_checkpointed_iteration.txt").read_text() == "30\n"
    assert [path for path in versioned.older.rglob("*") if path.is_file()], "versions were kept"
    document("cp", versioned.url, tmp_path / "back")
    assert findings("verify", tmp_path / "back", code=0) == []


def test_a_server_that_takes_a_removed_object_for_one_is_refused_at_the_start_of_a_run(
    versioned: Versioned,
) -> None:
    """S3 takes a put where the newest version is the mark of a removal; versitygw does not."""
    bucket = open_store(versioned.url, StoreOptions(limits=FAST))
    bucket.create("p", b"1")
    bucket.delete(["p"])
    with pytest.raises(ConditionRefusedError, match="if the bucket keeps versions"):
        bucket.create("p", b"2")
    client = StoreMonitorClient(
        bucket,
        attempt=0,
        incarnation=secrets.token_hex(8),
        settings=CoreSettings(),
        tick_seconds=0.1,
        timeout_seconds=20,
    )
    with pytest.raises(StorageUnavailableError, match="give a bucket without versions"):
        client.claim("local")
    client.close()
    assert bucket.find("run/TERM.json") is None
