"""A store that is opened with given credentials takes nothing of the environment beside them."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from obstore.store import AzureStore, S3Store
from trainsync.storage.objects import address, opening
from trainsync.storage.objects.of_run import open_run_store, options_of_run

OURS = {
    "s3": {
        "TRAINSYNC_STORE_AWS_ACCESS_KEY_ID": "ours",
        "TRAINSYNC_STORE_AWS_SECRET_ACCESS_KEY": "ours",
    },
    "az": {
        "TRAINSYNC_STORE_AZURE_STORAGE_ACCOUNT_NAME": "ours",
        "TRAINSYNC_STORE_AZURE_STORAGE_ACCOUNT_KEY": "a2V5LW9mLXRoZS1ydW4=",
    },
}


def give(environ: pytest.MonkeyPatch, scheme: str) -> None:
    for name, value in OURS[scheme].items():
        environ.setenv(name, value)


@contextmanager
def server() -> Iterator[tuple[str, list[tuple[str, dict[str, str]]]]]:
    """A server that knows no object, and what it was asked."""
    seen: list[tuple[str, dict[str, str]]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append((self.path, {k.lower(): v for k, v in self.headers.items()}))
            self.send_response(404)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            return

    serving = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=serving.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{serving.server_address[1]}", seen
    finally:
        serving.shutdown()
        thread.join(10)
        serving.server_close()


@pytest.fixture
def ours(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The environment of a pod whose training has its own credentials."""
    for name, value in {
        "AWS_SESSION_TOKEN": "users-token",
        "AWS_ACCESS_KEY_ID": "users",
        "AWS_SECRET_ACCESS_KEY": "users",
        "AWS_REGION": "eu-user-1",
        "AWS_SKIP_SIGNATURE": "true",
        "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "true",
        "AWS_ENDPOINT_URL": "http://127.0.0.1:1",
        "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:1",
        "AZURE_STORAGE_ACCOUNT_NAME": "users",
        "AZURE_STORAGE_ACCOUNT_KEY": "dXNlcnM=",
        "AZURE_STORAGE_SAS_TOKEN": "sig=users",
        "AZURE_STORAGE_TOKEN": "users",
        "AZURE_STORAGE_ENDPOINT": "http://127.0.0.1:1",
        "GOOGLE_SERVICE_ACCOUNT": "/none/users.json",
        "GOOGLE_BASE_URL": "http://127.0.0.1:1",
        "TRAINSYNC_STORE_ALLOW_HTTP": "true",
    }.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_keys_of_the_run_go_to_s3_without_the_users_token_and_region(
    ours: pytest.MonkeyPatch,
) -> None:
    give(ours, "s3")
    with server() as (endpoint, seen):
        ours.setenv("TRAINSYNC_STORE_ENDPOINT", endpoint)
        assert open_run_store("s3://bucket/a").find("x") is None
    path, headers = seen[0]
    assert path == "/bucket/a/x"
    assert "Credential=ours/" in headers["authorization"]
    assert "/us-east-1/s3/" in headers["authorization"]
    assert "x-amz-security-token" not in headers


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("s3://bucket/a", "https://s3.us-east-1.amazonaws.com"),
        ("az://container/a", "https://ours.blob.core.windows.net"),
    ],
)
def test_no_endpoint_of_the_environment_is_taken(
    url: str, expected: str, ours: pytest.MonkeyPatch
) -> None:
    give(ours, url[:2])
    store = opening._open(address.parse(url), options_of_run(), 1.0)
    assert isinstance(store, S3Store | AzureStore)
    found = [str(value) for name, value in store.config.items() if "endpoint" in name]
    found = [value for value in found if "//" in value]
    assert set(found) == {expected}


def test_keys_of_the_run_go_to_azure_without_the_users_tokens(ours: pytest.MonkeyPatch) -> None:
    give(ours, "az")
    with server() as (endpoint, seen):
        ours.setenv("TRAINSYNC_STORE_ENDPOINT", endpoint)
        assert open_run_store("az://container/a").find("x") is None
    path, headers = seen[0]
    assert "users" not in path
    assert headers["authorization"].startswith("SharedKey ours:")


def test_the_key_of_the_run_goes_to_google_though_the_environment_names_a_file(
    ours: pytest.MonkeyPatch,
) -> None:
    with server() as (endpoint, seen):
        key = {
            "type": "service_account",
            "client_email": "a@b",
            "private_key": "x",
            "private_key_id": "y",
            "gcs_base_url": endpoint,
            "disable_oauth": True,
        }
        ours.setenv("TRAINSYNC_STORE_GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps(key))
        assert open_run_store("gs://bucket/a").find("x") is None
    assert seen[0][0].startswith("/bucket/a")
