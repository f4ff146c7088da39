"""A proxy before the S3 server that breaks requests, and counts them.

It passes the client's Host on: that is signed.
"""

import http.client
import re
import secrets
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding"}
_LONGEST_HELD = 120.0


class Fault(Enum):
    """What happens to a request."""

    LOST_REPLY = auto()
    """The server does it, and the client never hears."""
    DONE_BUT_500 = auto()
    """The server does it, and the client hears that it failed, so that it asks again."""
    REFUSED = auto()
    """Answered with the rule's status, without the server."""
    TRUNCATED = auto()
    """Half of the answer's body, then the connection ends."""
    CORRUPTED = auto()
    """One bit of the answer's body is another."""
    DELAYED = auto()
    """Answered after the rule's ``seconds``."""
    CUT = auto()
    """The connection ends, and the server never hears."""
    HALF_SENT = auto()
    """The server gets half of the request's body, and then the connection ends."""
    HELD = auto()
    """The connection ends; the server hears of it when the rule's ``released`` is set."""
    OTHER_ETAG = auto()
    """The answer names another e-tag."""


@dataclass
class Rule:
    """Breaks the next ``left`` requests with that method and a path and query like ``pattern``."""

    fault: Fault
    method: str
    pattern: str
    left: int = 1
    status: int = 503
    code: str = "SlowDown"
    after: int = 0
    """So many such requests go by before."""
    seconds: float = 0.0
    strike: Callable[[], None] = lambda: None
    """Called when it breaks a request, right before the connection ends or the answer goes."""
    released: threading.Event = field(default_factory=threading.Event)
    late: list[int] = field(default_factory=list)
    """Statuses that the server has answered to what was held."""


@dataclass
class FaultProxy:
    """See `running`."""

    target: int
    port: int = 0
    rules: list[Rule] = field(default_factory=list)
    asked: list[tuple[str, str]] = field(default_factory=list)
    """Method, and path with query, of each request."""
    sent: list[tuple[str, int]] = field(default_factory=list)
    """Path with query, and bytes of the answer's body, of each GET that was answered."""
    listing: Callable[[str, str, bytes, bytes], bytes] | None = None
    """Told method, path with query, and both bodies of each request that succeeded; gives the
    answer's body."""
    rate: float = 0.0
    """Bytes a second of each body; 0: as fast as it goes."""
    busy: int = 0
    """Requests that are not answered yet; those that are held do not count."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def break_next(
        self, fault: Fault, method: str, pattern: str = "", left: int = 1, **more: Any
    ) -> Rule:
        rule = Rule(fault, method, pattern, left, **more)
        self.rules.append(rule)
        return rule

    def seen(self, method: str, path: str) -> Rule | None:
        with self._lock:
            self.asked.append((method, path))
            for rule in self.rules:
                fits = rule.method == method and re.search(rule.pattern, path)
                if not fits or not rule.left:
                    continue
                if rule.after:
                    rule.after -= 1
                    continue
                rule.left -= 1
                return rule
        return None

    def count(self, change: int) -> None:
        """A request begins or ends."""
        with self._lock:
            self.busy += change

    @contextmanager
    def running(self) -> Iterator["FaultProxy"]:
        """Serve while the body runs."""
        server = _Listener(("127.0.0.1", 0), _Handler)
        server.proxy = self
        self.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    proxy: FaultProxy

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a client that was killed."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each answer waits 40 ms for the client's ACK
    server: _Listener

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _do(self) -> None:
        proxy = self.server.proxy
        proxy.count(1)
        try:
            self._pass_on(proxy)
        finally:
            proxy.count(-1)

    def _pass_on(self, proxy: FaultProxy) -> None:
        length = int(self.headers.get("Content-Length", "0"))
        body = self.rfile.read(length)
        if len(body) < length:  # the client has ended; the server is not to wait for the rest
            self._ask(proxy, body, len(body))
            self._cut()
            return
        rule = proxy.seen(self.command, self.path)
        fault = rule.fault if rule else None
        if rule is not None and fault is Fault.REFUSED:
            rule.strike()
            self._fail(rule.status, rule.code)
            return
        if rule is not None and fault in (Fault.CUT, Fault.HALF_SENT, Fault.HELD):
            rule.strike()
            self._cut()
            if fault is Fault.HALF_SENT:
                self._ask(proxy, body, len(body) // 2)
            elif fault is Fault.HELD:
                proxy.count(-1)
                rule.released.wait(_LONGEST_HELD)
                proxy.count(1)
                late = self._ask(proxy, body)
                if late is not None:
                    rule.late.append(late[0].status)
            return
        if proxy.rate:
            threading.Event().wait(len(body) / proxy.rate)
        found = self._ask(proxy, body)
        if found is None:  # the server is dead
            self._cut()
            return
        answer, data = found
        if rule is not None and fault is Fault.DELAYED:
            threading.Event().wait(rule.seconds)
        if rule is not None:
            rule.strike()
        if fault is Fault.LOST_REPLY:
            self._cut()
        elif fault is Fault.DONE_BUT_500:
            self._fail(500, "InternalError")
        else:
            self._answer(answer, data, fault)

    def _ask(
        self, proxy: FaultProxy, body: bytes, sent: int | None = None
    ) -> tuple[http.client.HTTPResponse, bytes] | None:
        """The server's answer; None: there is none. Of the body only ``sent`` bytes go."""
        connection = http.client.HTTPConnection("127.0.0.1", proxy.target, timeout=30)
        connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() not in _HOP_BY_HOP:
                connection.putheader(name, value)
        try:
            connection.endheaders(body[:sent])
            if sent is not None:
                return None
            answer = connection.getresponse()
            data = answer.read()
        except (OSError, http.client.HTTPException):
            return None
        finally:
            connection.close()
        if proxy.listing is not None and answer.status < 300:
            data = proxy.listing(self.command, self.path, body, data)
        return answer, data

    def _answer(self, answer: http.client.HTTPResponse, data: bytes, fault: Fault | None) -> None:
        if self.command == "GET":
            self.server.proxy.sent.append((self.path, len(data)))
        self.send_response_only(answer.status)
        for name, value in answer.getheaders():
            if fault is Fault.OTHER_ETAG and name.lower() == "etag":
                value = f'"{secrets.token_hex(16)}"'
            if name.lower() not in {*_HOP_BY_HOP, "content-length"}:
                self.send_header(name, value)
        length = answer.getheader("Content-Length") if self.command == "HEAD" else str(len(data))
        self.send_header("Content-Length", length or "0")
        self.end_headers()
        if self.server.proxy.rate:
            threading.Event().wait(len(data) / self.server.proxy.rate)
        if fault is Fault.CORRUPTED and data:
            data = bytes([data[0] ^ 1]) + data[1:]
        if fault is Fault.TRUNCATED:
            self.wfile.write(data[: len(data) // 2])
            self._cut()
            return
        self.wfile.write(data)

    def _fail(self, status: int, code: str) -> None:
        text = (
            f"<?xml version='1.0'?><Error><Code>{code}</Code><Message>The proxy says so."
            "</Message><AWSAccessKeyId>AKIATESTTESTTESTTEST</AWSAccessKeyId></Error>"
        ).encode()
        self.send_response_only(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)

    def _cut(self) -> None:
        self.close_connection = True
        with suppress(OSError):
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_RDWR)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _do  # noqa: N815
