"""Google's XML API of Cloud Storage before fake-gcs-server, which has little of it.

obstore speaks the XML API to GCS. Of its requests fake-gcs-server 1.56 takes no put, no upload of
several parts, no ``If-None-Match`` and no page of a listing, but it has the JSON API. So each
request is translated into one of that:

- a put into an upload with ``ifGenerationMatch``, so that fake-gcs-server alone decides, under its
  own lock, which put of an object holds;
- a deletion into one deletion, a listing into pages of 100 objects (Google's have at most 1,000);
- a read into a download, with its range; ``If-None-Match`` is compared with the e-tag that came.

The parts of an upload are held here until it is completed by one put. Whatever else is asked is
refused with 501. Of Google's own limits none is tried but the 5 MiB that a part has at least: not
one write a second of each object, no rights and no quotas.
"""

import hashlib
import http.client
import json
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

_PAGE = 100
_SMALLEST_PART = 5 << 20
_PASSED_ON = ("ETag", "Last-Modified", "Content-Range", "Content-Type", "x-goog-generation")


class _Front(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    target: int

    def __init__(self, target: int) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target = target
        self.authorizations: set[str] = set()
        """Of all requests that came."""
        self.uploads: dict[str, tuple[str, dict[int, bytes]]] = {}
        """By their id: the object's path, and its parts by their numbers."""


@contextmanager
def running(target: int) -> Iterator[tuple[int, set[str]]]:
    """The front's port, and the ``Authorization`` of requests, for as long as the body runs.

    Args:
        target: fake-gcs-server's port on this machine.
    """
    server = _Front(target)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server.server_address[1], server.authorizations
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # else each answer waits 40 ms for the client's ACK
    server: _Front

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _do(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
        self.server.authorizations.add(self.headers.get("Authorization", ""))
        url = urlsplit(self.path)
        bucket, _, key = url.path.removeprefix("/").partition("/")
        self.bucket, self.key = unquote(bucket), unquote(key)
        query = dict(parse_qsl(url.query, keep_blank_values=True))
        if "x-goog-copy-source" in self.headers or "generation" in query:
            self._fail(501, "NotImplemented")
        elif "uploads" in query or "uploadId" in query:
            self._of_upload(query, body)
        elif self.key and self.command in ("GET", "HEAD"):
            self._get()
        elif self.key and self.command == "PUT":
            self._put(body, self.headers.get("x-goog-if-generation-match"))
        elif self.key and self.command == "DELETE":
            self._delete()
        elif self.command == "GET" and query.get("list-type") == "2":
            self._list(query)
        else:
            self._fail(501, "NotImplemented")

    def _of_upload(self, query: dict[str, str], body: bytes) -> None:
        uploads = self.server.uploads
        path = f"{self.bucket}/{self.key}"
        upload = query.get("uploadId", "")
        if self.command == "POST" and "uploads" in query:
            made = secrets.token_hex(16)
            uploads[made] = path, {}
            self._answer_xml(f"<UploadId>{made}</UploadId>", "InitiateMultipartUploadResult")
        elif upload not in uploads or uploads[upload][0] != path:
            self._fail(404, "NoSuchUpload")
        elif self.command == "PUT":
            uploads[upload][1][int(query["partNumber"])] = body
            self._answer(200, {"ETag": _tag(body)})
        elif self.command == "DELETE":
            uploads.pop(upload, None)
            self._answer(204)
        elif self.command == "POST":
            self._complete(upload, body)
        else:
            self._fail(501, "NotImplemented")

    def _complete(self, upload: str, body: bytes) -> None:
        _, parts = self.server.uploads.pop(upload, ("", {}))  # one of those that complete it wins
        named = ElementTree.fromstring(body).iter("Part")
        asked = {int(p.findtext("PartNumber", "")): p.findtext("ETag", "") for p in named}
        if {number: _tag(part) for number, part in parts.items()} != asked:
            self._fail(400, "InvalidPart")
            return
        ordered = [parts[number] for number in sorted(parts)]
        if any(len(part) < _SMALLEST_PART for part in ordered[:-1]):
            self._fail(400, "EntityTooSmall")
            return
        made = self._insert(b"".join(ordered), None)
        if made is not None:
            headers = {"x-goog-generation": made["generation"]}
            tag = f"<ETag>&quot;{made['etag']}&quot;</ETag>"
            self._answer_xml(tag, "CompleteMultipartUploadResult", headers)

    def _put(self, body: bytes, generation: str | None) -> None:
        made = self._insert(body, generation)
        if made is not None:
            headers = {"ETag": f'"{made["etag"]}"', "x-goog-generation": made["generation"]}
            self._answer(200, headers)

    def _insert(self, body: bytes, generation: str | None) -> dict[str, Any] | None:
        """fake-gcs-server's record of the object; None: it has refused, and that is answered."""
        query = {"uploadType": "media", "name": self.key}
        if generation is not None:
            query["ifGenerationMatch"] = generation
        path = f"/upload/storage/v1/b/{quote(self.bucket)}/o?{urlencode(query)}"
        kind = self.headers.get("Content-Type", "application/octet-stream")
        answer, data = self._ask("POST", path, body, {"Content-Type": kind})
        if answer.status != 200:
            self._refused(answer.status)
            return None
        made: dict[str, Any] = json.loads(data)
        return made

    def _get(self) -> None:
        path = f"/download/storage/v1/b/{quote(self.bucket)}/o/{quote(self.key, safe='')}"
        ranged = {name: self.headers[name] for name in ("Range",) if name in self.headers}
        answer, data = self._ask(self.command, path, b"", ranged)
        headers = {name: answer.headers[name] for name in _PASSED_ON if name in answer.headers}
        if answer.status not in (200, 206):
            self._refused(answer.status)
        elif headers["ETag"] == self.headers.get("If-None-Match"):
            self._answer(304, headers)
        else:
            length = answer.headers["Content-Length"]
            self._answer(answer.status, {**headers, "Content-Length": length}, data)

    def _delete(self) -> None:
        path = f"/storage/v1/b/{quote(self.bucket)}/o/{quote(self.key, safe='')}"
        answer, _ = self._ask("DELETE", path)
        if answer.status == 200:
            self._answer(204)
        else:
            self._refused(answer.status)

    def _list(self, query: dict[str, str]) -> None:
        asked = {
            "maxResults": min(int(query.get("max-keys", _PAGE)), _PAGE),
            "prefix": query.get("prefix", ""),
            "delimiter": query.get("delimiter", ""),
            "startOffset": query.get("start-after", ""),
            "pageToken": query.get("continuation-token", ""),
        }
        path = f"/storage/v1/b/{quote(self.bucket)}/o?{urlencode(asked)}"
        answer, data = self._ask("GET", path)
        if answer.status != 200:
            self._refused(answer.status)
            return
        found = json.loads(data)
        lines = [
            f"<Contents><Key>{escape(item['name'])}</Key><Size>{item['size']}</Size>"
            f"<LastModified>{item['updated']}</LastModified>"
            f"<ETag>&quot;{item['etag']}&quot;</ETag></Contents>"
            for item in found.get("items", [])
            if item["name"] != asked["startOffset"]  # Google's begins after it
        ]
        lines += [
            f"<CommonPrefixes><Prefix>{escape(prefix)}</Prefix></CommonPrefixes>"
            for prefix in found.get("prefixes") or []
        ]
        if found.get("nextPageToken"):
            token = escape(found["nextPageToken"])
            lines.append(f"<NextContinuationToken>{token}</NextContinuationToken>")
        self._answer_xml("".join(lines), "ListBucketResult")

    def _ask(
        self, method: str, path: str, body: bytes = b"", headers: dict[str, str] | None = None
    ) -> tuple[http.client.HTTPResponse, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.target, timeout=30)
        try:
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            return answer, answer.read()
        finally:
            connection.close()

    def _refused(self, status: int) -> None:
        """Answer as Google does what fake-gcs-server has refused with ``status``."""
        codes = {404: "NoSuchKey", 412: "PreconditionFailed", 416: "InvalidRange"}
        if (
            status == 404
            and self._ask("GET", f"/storage/v1/b/{quote(self.bucket)}")[0].status == 404
        ):
            self._fail(404, "NoSuchBucket")
        else:
            self._fail(status, codes.get(status, "InternalError"))

    def _fail(self, status: int, code: str) -> None:
        text = f"<Code>{code}</Code><Message>The front says so.</Message>"
        self._answer_xml(text, "Error", status=status)

    def _answer_xml(
        self, text: str, root: str, headers: dict[str, str] | None = None, status: int = 200
    ) -> None:
        body = f"<?xml version='1.0' encoding='UTF-8'?><{root}>{text}</{root}>".encode()
        self._answer(status, {"Content-Type": "application/xml", **(headers or {})}, body)

    def _answer(
        self, status: int, headers: dict[str, str] | None = None, body: bytes = b""
    ) -> None:
        self.send_response_only(status)
        for name, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _do  # noqa: N815


def _tag(data: bytes) -> str:
    return f'"{hashlib.md5(data, usedforsecurity=False).hexdigest()}"'
