"""A stand-in for the agent of EKS that gives pods keys (EKS Pod Identity)."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tests.store.servers.server import ACCESS, SECRET


@dataclass
class Identity:
    """``asked`` has the token of each request for keys, which are good for ``seconds``."""

    endpoint: str
    seconds: float
    asked: list[str | None] = field(default_factory=list)


@contextmanager
def serving(seconds: float) -> Iterator[Identity]:
    """Give the server's keys while the body runs.

    Their session token is empty: versitygw refuses all others.
    """

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None:
            pass

        def do_GET(self) -> None:
            found.asked.append(self.headers.get("Authorization"))
            until = datetime.now(UTC) + timedelta(seconds=found.seconds)
            keys = {"AccessKeyId": ACCESS, "SecretAccessKey": SECRET, "Token": ""}
            data = json.dumps({**keys, "Expiration": until.strftime("%Y-%m-%dT%H:%M:%SZ")})
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data.encode())

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
        found = Identity(f"http://127.0.0.1:{listening.server_address[1]}/v1/credentials", seconds)
        thread = threading.Thread(target=listening.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield found
        finally:
            listening.shutdown()
            thread.join()
