"""Stand-ins for what gives pods keys: AWS's STS, GKE's metadata server, Azure's Entra."""

import http.client
import json
import secrets
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from tests.store.servers.server import ACCESS, SECRET

_STS = """<AssumeRoleWithWebIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/">
<AssumeRoleWithWebIdentityResult><Credentials><SessionToken></SessionToken>
<SecretAccessKey>{secret}</SecretAccessKey><AccessKeyId>{access}</AccessKeyId>
<Expiration>{until}</Expiration></Credentials></AssumeRoleWithWebIdentityResult>
</AssumeRoleWithWebIdentityResponse>"""


@dataclass
class Identities:
    """A running stand-in, whose keys and tokens are good for ``seconds``.

    ``asked`` has what each request for them gave: its path, and its parameters. ``tokens`` are
    those that were given. With ``refuses`` none is.
    """

    endpoint: str
    seconds: float
    asked: list[tuple[str, dict[str, str]]] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    refuses: bool = False

    @property
    def host(self) -> str:
        return self.endpoint.partition("://")[2]

    def answer(self, path: str, given: dict[str, str]) -> tuple[str, str]:
        """The content's type, and the content."""
        self.asked.append((path, given))
        if given.get("Action") == "AssumeRoleWithWebIdentity":
            until = datetime.now(UTC) + timedelta(seconds=self.seconds)
            found = _STS.format(access=ACCESS, secret=SECRET, until=f"{until:%Y-%m-%dT%H:%M:%SZ}")
            return "text/xml", found
        self.tokens.append(secrets.token_hex(8))
        token = {"access_token": self.tokens[-1], "token_type": "Bearer"}
        return "application/json", json.dumps({**token, "expires_in": int(self.seconds)})


def certificate(directory: Path) -> Path:
    """Make an authority in ``directory`` (``ca.pem``), and the key and certificate of a server on
    127.0.0.1; the file of these two."""
    ec = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2")
    files = {name: str(directory / name) for name in ("ca.pem", "ca.key", "server.pem", "key.pem")}
    authority = ("-CA", files["ca.pem"], "-CAkey", files["ca.key"])
    leaf = ("-addext", "subjectAltName=IP:127.0.0.1", "-addext", "basicConstraints=CA:FALSE")
    made = {
        "an authority": ("-keyout", files["ca.key"], "-out", files["ca.pem"]),
        "a server": (*authority, *leaf, "-keyout", files["key.pem"], "-out", files["server.pem"]),
    }
    for name, words in made.items():
        command = ["openssl", "req", "-x509", *ec, "-subj", f"/CN={name}", *words]
        subprocess.run(command, check=True, capture_output=True)
    both = directory / "both.pem"
    both.write_text(Path(files["server.pem"]).read_text() + Path(files["key.pem"]).read_text())
    return both


@contextmanager
def serving(seconds: float = 3600.0, tls: Path | None = None) -> Iterator[Identities]:
    """Give keys and tokens while the body runs. versitygw refuses all session tokens but ''.

    Args:
        tls: certificate and key of the server; None: it speaks plain http.
    """

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

        def _do(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", "0"))).decode()
            url = urlsplit(self.path)
            given = dict(parse_qsl(f"{url.query}&{body}"))
            given["flavor"] = self.headers.get("Metadata-Flavor", "")
            kind, text = found.answer(url.path, given)
            self.send_response(403 if found.refuses else 200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        do_GET = do_POST = _do  # noqa: N815

    with _listening(Handler, tls) as port:
        scheme = "http" if tls is None else "https"
        found = Identities(f"{scheme}://127.0.0.1:{port}", seconds)
        yield found


@contextmanager
def azure_front(identities: Identities, port: int, access: str) -> Iterator[int]:
    """Azurite behind a door that takes the tokens of ``identities`` alone; the door's port.

    Azurite itself takes tokens over https alone, whose signer it does not check.

    Args:
        port: azurite's.
        access: a shared access signature, in whose name requests with a token are made.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: object) -> None:
            pass

        def _do(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
            kind, _, token = self.headers.get("Authorization", "").partition(" ")
            if (kind, token in identities.tokens) != ("Bearer", True):
                self._answer(401, {}, b"")
                return
            dropped = ("authorization", "host")
            headers = {k: v for k, v in self.headers.items() if k.lower() not in dropped}
            joined = f"{self.path}{'&' if '?' in self.path else '?'}{access}"
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            connection.request(self.command, joined, body, headers)
            answer = connection.getresponse()
            data = answer.read()
            passed = {
                name: value
                for name, value in answer.getheaders()
                if name.lower() not in ("transfer-encoding", "connection", "content-length")
            }
            length = answer.headers.get("Content-Length") or str(len(data))
            self._answer(answer.status, {**passed, "Content-Length": length}, data)
            connection.close()

        def _answer(self, status: int, headers: dict[str, Any], data: bytes) -> None:
            self.send_response_only(status)
            for name, value in {"Content-Length": str(len(data)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _do  # noqa: N815

    with _listening(Handler) as door:
        yield door


@contextmanager
def _listening(handler: type[BaseHTTPRequestHandler], tls: Path | None = None) -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as listening:
        if tls is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(tls)
            listening.socket = context.wrap_socket(listening.socket, server_side=True)
        listening.daemon_threads = True
        listening.block_on_close = False
        thread = threading.Thread(target=listening.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield listening.server_address[1]
        finally:
            listening.shutdown()
            thread.join()
