"""A server that speaks S3 for tests: its keys, its users, and the requests that obstore lacks."""

import base64
import hashlib
import hmac
import http.client
import json
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from devcluster import object_store
from devcluster.object_store import REGION as REGION  # tests take it from here
from tests.ports import port_of, reserved_port

ACCESS = "AKIATESTTESTTESTTEST"
SECRET = "secret-that-no-message-may-show"


@dataclass(frozen=True)
class Server:
    """A running server; ``root`` holds a directory for each bucket."""

    program: Path
    pid: int
    port: int
    root: Path
    host: str = "127.0.0.1"

    @property
    def endpoint(self) -> str:
        return f"http://{self.host}:{self.port}"

    def bucket(self, name: str) -> Path:
        """Make a bucket; the directory with its objects as files."""
        place = self.root / name
        place.mkdir()
        return place

    def add_user(self, access: str, secret: str) -> None:
        """A user without any right."""
        admin = ["--access", ACCESS, "--secret", SECRET, "--region", REGION]
        user = ["--access", access, "--secret", secret, "--role", "user"]
        command = [self.program, "admin", *admin, "--endpoint-url", self.endpoint, "create-user"]
        subprocess.run([*command, *user], check=True, capture_output=True, timeout=30)

    def set_policy(self, bucket: str, policy: dict[str, Any]) -> None:
        """Put a bucket's policy."""
        body = json.dumps(policy).encode()
        request(self.port, "PUT", f"/{bucket}", "policy", body)

    def versioned_bucket(self, name: str, locked_days: int = 0) -> Path:
        """Make a bucket that keeps older versions of objects; the directory with the newest.

        Args:
            locked_days: nobody may remove or replace a version for so long; 0: it has no lock.
        """
        locked = {"x-amz-bucket-object-lock-enabled": "true"} if locked_days else {}
        request(self.port, "PUT", f"/{name}", more=locked)
        if locked_days:
            rule = f"<Mode>COMPLIANCE</Mode><Days>{locked_days}</Days>"
            text = (
                "<ObjectLockConfiguration><ObjectLockEnabled>Enabled</ObjectLockEnabled><Rule>"
                f"<DefaultRetention>{rule}</DefaultRetention></Rule></ObjectLockConfiguration>"
            )
            body = text.encode()
            wanted = {"content-md5": base64.b64encode(hashlib.md5(body).digest()).decode()}
            request(self.port, "PUT", f"/{name}", "object-lock", body, wanted)
        else:
            text = "<VersioningConfiguration><Status>Enabled</Status></VersioningConfiguration>"
            request(self.port, "PUT", f"/{name}", "versioning", text.encode())
        return self.root / name


def request(
    port: int,
    method: str,
    path: str,
    query: str = "",
    body: bytes = b"",
    more: Mapping[str, str] | None = None,
) -> None:
    """A request that obstore does not have, signed as S3 wants it (Signature Version 4)."""
    host, now = f"127.0.0.1:{port}", datetime.now(UTC)
    stamp, day = now.strftime("%Y%m%dT%H%M%SZ"), now.strftime("%Y%m%d")
    digest = hashlib.sha256(body).hexdigest()
    headers = {"host": host, "x-amz-content-sha256": digest, "x-amz-date": stamp}
    headers = dict(sorted({**headers, **(more or {})}.items()))
    names = ";".join(headers)
    lines = "".join(f"{name}:{value}\n" for name, value in headers.items())
    asked = f"{query}=" if query else ""
    canonical = f"{method}\n{path}\n{asked}\n{lines}\n{names}\n{digest}"
    scope = f"{day}/{REGION}/s3/aws4_request"
    signed = hashlib.sha256(canonical.encode()).hexdigest()
    key = f"AWS4{SECRET}".encode()
    for text in (*scope.split("/"), f"AWS4-HMAC-SHA256\n{stamp}\n{scope}\n{signed}"):
        key = hmac.digest(key, text.encode(), "sha256")
    headers["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={ACCESS}/{scope}, SignedHeaders={names}, "
        f"Signature={key.hex()}"
    )
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request(method, f"{path}?{query}" if query else path, body, headers)
    answer = connection.getresponse()
    assert answer.status < 300, answer.read()
    connection.close()


@contextmanager
def serving(
    program: Path,
    root: Path,
    host: str = "127.0.0.1",
    port: int | None = None,
    *,
    versions: bool = False,
) -> Iterator[Server]:
    """A server for as long as the body runs, on what an earlier one left; then it is killed.

    Args:
        host: the address that it listens on; "": all of this machine.
        port: a free one without it.
        versions: see `object_store.serving`.
    """
    with reserved_port() as bound:
        port = port_of(bound) if port is None else port
        serving = object_store.serving(program, root, host, port, ACCESS, SECRET, versions=versions)
        with serving as process:
            yield Server(program, process.pid, port, root, host)
