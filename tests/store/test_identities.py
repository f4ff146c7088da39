"""Without keys a pod reaches its bucket by its workload's identity, in each cloud."""

from pathlib import Path

import pytest
from trainsync.storage.layout import RunDirectory

from tests.store.conftest import Place
from tests.store.servers import cloud_identities
from tests.store.servers.azurite import ACCOUNT, Azurite
from tests.store.servers.gcs import Gcs
from tests.unit.cli.commands import call, document, findings

WORD = "the-token-of-the-service-account"


@pytest.fixture
def token(tmp_path: Path) -> Path:
    """The file that Kubernetes projects into a pod."""
    path = tmp_path / "token"
    path.write_text(WORD)
    return path


def test_in_eks_by_the_role_of_the_service_account(
    place: Place,
    run: RunDirectory,
    token: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """IRSA: the token is exchanged at AWS's STS, by https alone."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", str(token))
    monkeypatch.setenv("AWS_ROLE_ARN", "arn:aws:iam::1:role/trainer")
    tls = cloud_identities.certificate(tmp_path)
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.pem"))
    with cloud_identities.serving(tls=tls) as identities:
        monkeypatch.setenv("AWS_ENDPOINT_URL_STS", identities.endpoint)
        document("cp", run.root, place.url())
        assert findings("verify", place.url(), code=0) == []
        asked = [given for _, given in identities.asked]
        assert {(one["WebIdentityToken"], one["RoleArn"]) for one in asked} == {
            (WORD, "arn:aws:iam::1:role/trainer")
        }


def test_in_gke_by_the_token_of_the_metadata_server(
    google: Gcs, gcs_bucket: str, run: RunDirectory, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("GOOGLE_SERVICE_ACCOUNT_KEY")
    monkeypatch.setenv("GOOGLE_BASE_URL", google.endpoint)
    monkeypatch.setenv("HOME", str(tmp_path))  # no credentials of a person
    with cloud_identities.serving() as identities:
        monkeypatch.setenv("GCE_METADATA_HOST", identities.host)
        google.authorizations.clear()
        document("cp", run.root, f"{gcs_bucket}/runs/a")
        assert findings("verify", f"{gcs_bucket}/runs/a", code=0) == []
        assert {given["flavor"] for _, given in identities.asked} == {"Google"}
        assert google.authorizations == {f"Bearer {one}" for one in identities.tokens}


def test_in_aks_by_the_federated_token_of_the_service_account(
    azure: Azurite,
    container: str,
    run: RunDirectory,
    token: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCOUNT_NAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", ACCOUNT)
    monkeypatch.setenv("AZURE_CLIENT_ID", "client")
    monkeypatch.setenv("AZURE_TENANT_ID", "tenant")
    monkeypatch.setenv("AZURE_FEDERATED_TOKEN_FILE", str(token))
    access = azure.shared_access(container.removeprefix("az://"), "racwdl")
    with (
        cloud_identities.serving() as identities,
        cloud_identities.azure_front(identities, azure.port, access) as door,
    ):
        monkeypatch.setenv("AZURE_AUTHORITY_HOST", identities.endpoint)
        monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", f"http://127.0.0.1:{door}/{ACCOUNT}")
        document("cp", run.root, f"{container}/runs/a")
        assert findings("verify", f"{container}/runs/a", code=0) == []
        asked = {(path, given["client_assertion"]) for path, given in identities.asked}
        assert asked == {("/tenant/oauth2/v2.0/token", WORD)}


def test_an_identity_that_is_refused_is_told_of_in_a_sentence_without_its_token(
    gcs_bucket: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("GOOGLE_SERVICE_ACCOUNT_KEY")
    monkeypatch.setenv("HOME", str(tmp_path))
    with cloud_identities.serving() as identities:
        identities.refuses = True
        monkeypatch.setenv("GCE_METADATA_HOST", identities.host)
        result = call("ls", f"{gcs_bucket}/runs/a")
    assert result.exit_code == 3
    (line,) = result.output.splitlines()
    assert "no credentials were found" in line
    assert not any(token in line for token in identities.tokens)
