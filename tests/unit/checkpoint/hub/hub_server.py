"""A server on this machine with the hub's contract for pushes, as huggingface_hub 1.33 asks it.

Repositories with branches of commits; preupload, LFS batch, upload and verify, commit. It checks
what a client sends: the token, each blob's sha256 and size, the parent of a commit.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final
from urllib.parse import parse_qs, urlsplit

import pytest
from huggingface_hub import constants
from trainsync.checkpoint.hub import repository

TOKEN: Final = "hf_tokenThatNoMessageMayShow"
SIGNATURE: Final = "signatureThatNoMessageMayShow"
_REPO: Final = r"(?P<repo>[\w.-]+/[\w.-]+)"


@dataclass
class Repo:
    """``files`` of each commit, by hash, the newest last."""

    private: bool
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    @property
    def head(self) -> str:
        return list(self.commits)[-1]

    @property
    def files(self) -> dict[str, bytes]:
        return self.commits[self.head]

    def add(self, files: dict[str, bytes], message: str) -> str:
        oid = hashlib.sha1(f"{len(self.commits)} {sorted(files)}".encode()).hexdigest()
        self.commits[oid] = files
        self.messages.append(message)
        return oid


@dataclass
class Rule:
    """Answers the next ``left`` requests like that with ``status``; after they were ``done``."""

    method: str
    pattern: str
    status: int
    left: int = 1
    done: bool = False
    after: int = 0


class RefusedError(Exception):
    def __init__(self, status: int, code: str = "", message: str = "") -> None:
        super().__init__(status)
        self.status, self.code, self.message = status, code, message


@dataclass
class Hub:
    """See `serving`."""

    endpoint: str = ""
    repos: dict[str, Repo] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    rules: list[Rule] = field(default_factory=list)
    asked: list[tuple[str, str]] = field(default_factory=list)
    ignored: set[str] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def make(self, name: str, *, private: bool = True) -> Repo:
        repo = self.repos[name] = Repo(private)
        repo.add({".gitattributes": b"*.safetensors filter=lfs\n"}, "initial commit")
        return repo

    def fail(self, method: str, pattern: str, status: int, left: int = 1, **more: Any) -> Rule:
        rule = Rule(method, pattern, status, left, **more)
        self.rules.append(rule)
        return rule

    def sent(self) -> list[tuple[str, str]]:
        """Requests that change something, or would."""
        return [(method, path) for method, path in self.asked if method != "GET"]

    def answer(self, method: str, path: str, headers: Any, body: bytes) -> Any:
        with self.lock:
            self.asked.append((method, path))
            rule = next(
                (
                    r
                    for r in self.rules
                    if r.left and r.method == method and re.search(r.pattern, path)
                ),
                None,
            )
            if rule is not None and rule.after:
                rule.after -= 1
                rule = None
            if rule is not None:
                rule.left -= 1
                if not rule.done:
                    raise RefusedError(rule.status)
            found = self._answer(method, path, headers, body)
            if rule is not None:
                raise RefusedError(rule.status)
            return found

    def _answer(self, method: str, path: str, headers: Any, body: bytes) -> Any:
        url = urlsplit(path)
        if url.path.startswith("/storage/"):
            return self._store(url.path.rpartition("/")[2], url.query, body)
        if headers.get("Authorization") != f"Bearer {TOKEN}":
            raise RefusedError(401, message="Invalid credentials in Authorization header")
        if (method, url.path) == ("POST", "/api/repos/create"):
            return self._create(json.loads(body))
        for wanted, pattern, handler in (
            ("GET", rf"/api/models/{_REPO}(?:/revision/(?P<rev>\w+))?", self._info),
            ("POST", rf"/api/models/{_REPO}/preupload/(?P<rev>\w+)", self._preupload),
            ("POST", rf"/{_REPO}\.git/info/lfs/objects/batch", self._batch),
            ("POST", rf"/{_REPO}/verify", self._verify),
            ("POST", rf"/api/models/{_REPO}/commit/(?P<rev>\w+)", self._commit),
        ):
            match = re.fullmatch(pattern, url.path)
            if method == wanted and match:
                repo = self.repos.get(match["repo"])
                if repo is None:
                    raise RefusedError(404, "RepoNotFound", "Repository not found")
                rev = match.groupdict().get("rev")
                if rev not in (None, "main", *repo.commits):
                    raise RefusedError(404, "RevisionNotFound", f"Invalid rev id: {rev}")
                return handler(match["repo"], repo, rev, parse_qs(url.query), body)
        raise RefusedError(404, "EntryNotFound", f"no {method} {url.path}")

    def _create(self, asked: dict[str, Any]) -> Any:
        name = f"{asked['organization']}/{asked['name']}"
        if name in self.repos:
            raise RefusedError(409)
        self.make(name, private=asked["visibility"] == "private")
        return {"url": f"{self.endpoint}/{name}"}

    def _info(self, name: str, repo: Repo, rev: str | None, query: Any, _: bytes) -> Any:
        oid = rev if rev in repo.commits else repo.head
        files = repo.commits[str(oid)]
        siblings = [
            {"rfilename": path} | ({"size": len(data)} if "blobs" in query else {})
            for path, data in sorted(files.items())
        ]
        return {"id": name, "sha": oid, "private": repo.private, "siblings": siblings}

    def _preupload(self, _name: str, repo: Repo, _rev: Any, _query: Any, body: bytes) -> Any:
        answers = []
        for file in json.loads(body)["files"]:
            path, there = file["path"], repo.files.get(file["path"])
            lfs = path.endswith(".safetensors")
            oid = None
            if there is not None:
                git = b"blob %d\0%b" % (len(there), there)
                oid = (hashlib.sha256(there) if lfs else hashlib.sha1(git)).hexdigest()
            answers.append(
                {
                    "path": path,
                    "uploadMode": "lfs" if lfs else "regular",
                    "shouldIgnore": path in self.ignored,
                    "oid": oid,
                }
            )
        return {"files": answers}

    def _batch(self, name: str, _repo: Repo, _rev: Any, _query: Any, body: bytes) -> Any:
        objects = []
        for one in json.loads(body)["objects"]:
            actions = {
                "upload": {"href": f"{self.endpoint}/storage/{one['oid']}?sig={SIGNATURE}"},
                "verify": {"href": f"{self.endpoint}/{name}/verify"},
            }
            objects.append(one if one["oid"] in self.blobs else one | {"actions": actions})
        return {"transfer": "basic", "objects": objects}

    def _store(self, oid: str, query: str, body: bytes) -> Any:
        if query != f"sig={SIGNATURE}" or hashlib.sha256(body).hexdigest() != oid:
            raise RefusedError(403)
        self.blobs[oid] = body
        return {}

    def _verify(self, _name: str, _repo: Repo, _rev: Any, _query: Any, body: bytes) -> Any:
        asked = json.loads(body)
        if len(self.blobs.get(asked["oid"], b"")) != asked["size"]:
            raise RefusedError(400, message="the object is not there")
        return {}

    def _commit(self, name: str, repo: Repo, _rev: Any, _query: Any, body: bytes) -> Any:
        header, *operations = [json.loads(line) for line in body.splitlines()]
        if header["value"].get("parentCommit") not in (None, repo.head):
            raise RefusedError(
                412, message="A commit has happened since. Please refresh and try again."
            )
        files = dict(repo.files)
        for one in operations:
            value = one["value"]
            if one["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif one["key"] == "lfsFile":
                files[value["path"]] = self.blobs[value["oid"]]
            elif one["key"] == "deletedFile":
                del files[value["path"]]
        oid = repo.add(files, header["value"]["summary"])
        return {"commitUrl": f"{self.endpoint}/{name}/commit/{oid}", "commitOid": oid}


@contextmanager
def serving() -> Iterator[Hub]:
    """A hub without repositories, while the body runs."""
    server = _Listener(("127.0.0.1", 0), _Handler)
    server.hub = hub = Hub(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def local_hub(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[Hub]:
    """huggingface_hub asks it alone, by LFS, with its token, and waits for nothing.

    Args:
        folder: where no token is.
    """
    with serving() as found:
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setattr(constants, "ENDPOINT", found.endpoint)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(folder / "no-token"))
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(repository, "WAITS", (0.0, 0.0))
        monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _: None)
        yield found


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    hub: Hub


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Listener

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", "0")))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def _do(self) -> None:
        body, extra = self._body(), {}
        try:
            found = self.server.hub.answer(self.command, self.path, self.headers, body)
            status = 200
        except RefusedError as refused:
            status, found = refused.status, {"error": refused.message}
            extra = {"X-Error-Code": refused.code, "X-Error-Message": refused.message}
        data = json.dumps(found).encode()
        self.send_response_only(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        for name, value in extra.items():
            if value:
                self.send_header(name, value)
        with suppress(BrokenPipeError):  # a client that waits no longer
            self.end_headers()
            self.wfile.write(data)

    do_GET = do_PUT = do_POST = _do  # noqa: N815
