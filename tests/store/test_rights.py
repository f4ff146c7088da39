"""The rights of docs/storage.md suffice, and none of them is too much: S3's policy, and Azure's
as permissions of a shared access signature, which azurite enforces."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trainsync.storage.layout import RunDirectory

from tests.store.conftest import Place
from tests.store.servers import pod_identity
from tests.store.servers.azurite import Azurite
from tests.store.servers.server import Server
from tests.unit.cli.commands import call, document, findings
from tests.unit.docs.pages import ROOT, blocks
from tests.waiting import eventually

USER = "AKIAUSERUSERUSERUSER"


@pytest.fixture(scope="module")
def user(server: Server) -> str:
    server.add_user(USER, "users-secret")
    return USER


def policy(place: Place, *without: str) -> dict[str, Any]:
    """That of the page, for the user and the bucket, less some actions."""
    (block,) = (b for b in blocks(ROOT / "docs/storage.md") if b.language == "json")
    found: dict[str, Any] = json.loads(block.text.replace("my-bucket", place.name))
    for statement in found["Statement"]:
        statement["Principal"] = {"AWS": [USER]}
        statement["Action"] = [name for name in statement["Action"] if name not in without]
    found["Statement"] = [one for one in found["Statement"] if one["Action"]]
    return found


@pytest.fixture
def as_user(
    server: Server, place: Place, user: str, monkeypatch: pytest.MonkeyPatch
) -> pytest.MonkeyPatch:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", user)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "users-secret")
    return monkeypatch


@pytest.mark.usefixtures("as_user")
def test_the_policy_suffices_for_every_command(
    server: Server, place: Place, run: RunDirectory
) -> None:
    server.set_policy(place.name, policy(place))
    for step in (10, 20, 30):
        document("cp", run.root, place.url(), "--step", step)
    assert findings("verify", place.url(), code=0) == []
    assert document("show", place.url(), "latest")["step"] == 30
    next(place.files.rglob("global_step_30/**/checkpoint_rank_0.pt")).unlink()
    assert len(document("repair", place.url())["actions"]) == 2
    document("cp", run.root, place.url(), "--step", 30)
    assert [r["step"] for r in document("prune", place.url(), "--keep", 1, "--yes")["removed"]] == [
        10
    ]


@pytest.mark.usefixtures("as_user")
@pytest.mark.parametrize("action", ["s3:ListBucket", "s3:GetObject", "s3:PutObject"])
def test_without_one_of_its_actions_a_copy_is_refused(
    server: Server, place: Place, run: RunDirectory, action: str
) -> None:
    server.set_policy(place.name, policy(place, action))
    result = call("cp", run.root, place.url())
    assert result.exit_code == 3
    assert "access is denied (403, AccessDenied)" in result.stderr
    assert not [key for key in place.objects() if "manifests/" in key]


@pytest.mark.usefixtures("as_user")
def test_without_the_right_to_delete_only_prune_is_refused(
    server: Server, place: Place, run: RunDirectory
) -> None:
    server.set_policy(place.name, policy(place, "s3:DeleteObject"))
    for step in (10, 20, 30):
        document("cp", run.root, place.url(), "--step", step)
    assert findings("verify", place.url(), code=0) == []
    result = call("prune", place.url(), "--keep", 1, "--yes")
    assert result.exit_code == 3
    assert "access is denied" in result.stderr
    assert [s["step"] for s in document("ls", place.url())["saves"]] == [10, 20, 20, 30]


@pytest.mark.usefixtures("as_user")
def test_to_read_two_actions_suffice(server: Server, place: Place, run: RunDirectory) -> None:
    with pytest.MonkeyPatch.context() as owner:
        owner.setenv("AWS_ACCESS_KEY_ID", "AKIATESTTESTTESTTEST")
        owner.setenv("AWS_SECRET_ACCESS_KEY", "secret-that-no-message-may-show")
        document("cp", run.root, place.url())
    writes = ("s3:PutObject", "s3:AbortMultipartUpload", "s3:DeleteObject")
    server.set_policy(place.name, policy(place, *writes))
    assert findings("verify", place.url(), code=0) == []
    document("cp", place.url(), run.root / "back")


@pytest.fixture
def allow(container: str, azure: Azurite, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Leaves commands these permissions alone."""

    def leave(permissions: str) -> None:
        name = container.removeprefix("az://")
        monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_KEY", raising=False)
        monkeypatch.setenv("AZURE_STORAGE_SAS_TOKEN", azure.shared_access(name, permissions))

    return leave


def test_in_azure_to_read_write_delete_and_list_suffice(
    container: str, run: RunDirectory, allow: Callable[[str], None]
) -> None:
    url = f"{container}/runs/a"
    allow("rwdl")
    for step in (10, 20, 30):
        document("cp", run.root, url, "--step", step)
    assert findings("verify", url, code=0) == []
    removed = document("prune", url, "--keep", 1, "--yes")["removed"]
    assert [save["step"] for save in removed] == [10]
    allow("rl")
    assert findings("verify", url, code=0) == []
    document("cp", url, run.root / "back")


@pytest.mark.parametrize("permissions", ["rdl", "wdl", "rwd"])
def test_in_azure_a_copy_without_one_of_them_is_refused(
    container: str, run: RunDirectory, allow: Callable[[str], None], permissions: str
) -> None:
    url = f"{container}/runs/a"
    allow(permissions)
    result = call("cp", run.root, url)
    assert result.exit_code == 3
    assert "access is denied (403" in result.stderr
    allow("rl")
    assert document("ls", url)["saves"] == []


def test_in_azure_without_the_right_to_delete_only_prune_is_refused(
    container: str, run: RunDirectory, allow: Callable[[str], None]
) -> None:
    url = f"{container}/runs/a"
    allow("rwl")
    for step in (10, 20, 30):
        document("cp", run.root, url, "--step", step)
    result = call("prune", url, "--keep", 1, "--yes")
    assert result.exit_code == 3
    assert "access is denied" in result.stderr
    assert [s["step"] for s in document("ls", url)["saves"]] == [10, 20, 20, 30]


def test_without_keys_a_pod_has_those_of_its_identity_and_asks_for_new_ones_in_time(
    place: Place, run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    token = tmp_path / "token"
    token.write_text("of-the-pod")
    monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(token))
    with pod_identity.serving(seconds=3600.0) as identity:
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", identity.endpoint)
        document("cp", run.root, place.url())
        assert findings("verify", place.url(), code=0) == []
        assert set(identity.asked) == {"of-the-pod"}
        before, bucket = len(identity.asked), place.open(credentials={})
        for number in range(20):
            bucket.create(f"last/{number}", b"")
        assert len(identity.asked) == before + 1
    with pod_identity.serving(seconds=10.0) as identity:  # new ones are wanted before that
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", identity.endpoint)
        bucket = place.open(credentials={})
        eventually(lambda: bucket.find("last/1") is not None and len(identity.asked) > 1, 30)
