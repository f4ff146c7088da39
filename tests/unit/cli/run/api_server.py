"""A fake API server over HTTP, for faults that a real one does not have."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from trainsync.api import names
from trainsync.api.base import format_time

Object = dict[str, Any]
NAMESPACE = "training"
UID = "11111111-2222-3333-4444-555555555555"
RUNS = f"/apis/{names.API_VERSION}/namespaces/{NAMESPACE}/{names.PLURAL}"
EVENTS = f"/api/v1/namespaces/{NAMESPACE}/events"


def minutes_ago(minutes: float) -> str:
    return format_time(datetime.now(UTC) - timedelta(minutes=minutes))


def training_run(name: str = "run", **status: Any) -> Object:
    """A run at step 45 of 60 after one restart; ``status`` replaces fields of the status."""
    condition = {"lastTransitionTime": minutes_ago(5), "observedGeneration": 1}
    saved = {"path": "global_step_40", "manifestDigest": "sha256:0", "bytes": 12_400_000}
    return {
        "apiVersion": names.API_VERSION,
        "kind": names.KIND,
        "metadata": {
            "name": name,
            "namespace": NAMESPACE,
            "uid": UID,
            "generation": 1,
            "creationTimestamp": minutes_ago(10),
        },
        "spec": {
            "clusters": [{"name": "main", "groups": [{"name": "trainer", "role": "Trainer"}]}]
        },
        "status": {
            "observedGeneration": 1,
            "phase": "Running",
            "attempt": 1,
            "restarts": 1,
            "startTime": minutes_ago(10),
            "conditions": [
                {"type": "Ready", "status": "True", "reason": "Running", "message": ""} | condition,
                {"type": "Failed", "status": "False", "reason": "No", "message": ""} | condition,
            ],
            "clusters": [
                {
                    "name": "main",
                    "rayCluster": f"{name}-main-1",
                    "attempt": 1,
                    "readyWorkers": 3,
                    "desiredWorkers": 3,
                    "jobStatus": "RUNNING",
                }
            ],
            "monitor": {"ready": True},
            "progress": {
                "step": 45,
                "totalSteps": 60,
                "stepsPerMinute": 12.5,
                "eta": minutes_ago(-1.2),
                "lastReportTime": minutes_ago(0),
                "metrics": {"reward": 0.824, "loss": 0.123456789},
            },
            "checkpoint": {
                "lastCommitted": {"step": 40, "time": minutes_ago(0.5)} | saved,
                "inFlight": [{"kind": "checkpoint", "step": 45, "receipts": 3, "participants": 4}],
                "retained": [30, 35, 40],
            },
            "weights": {
                "trainerVersion": 45,
                "lag": 1,
                "method": "nccl",
                "lastDurationSeconds": 0.21,
                "lastBytes": 12_400_000,
                "explorers": [
                    {"id": "explorer-0", "version": 45, "lag": 0, "state": "running"},
                    {"id": "explorer-1", "version": 44, "lag": 1, "state": "running"},
                ],
            },
        }
        | status,
    }


def event(about: Object, reason: str, minutes: float, message: str = "", **changed: Any) -> Object:
    return {
        "involvedObject": about,
        "reason": reason,
        "message": message,
        "type": "Normal",
        "firstTimestamp": minutes_ago(minutes),
        "lastTimestamp": minutes_ago(minutes),
        "count": 1,
    } | changed


class CutShort(str):
    """A body whose connection ends before its last byte."""

    __slots__ = ()


Answer = tuple[int, Object | str]


class ApiServer:
    """``answers`` maps a path to status and body; other paths are answered with 404."""

    def __init__(self) -> None:
        self.answers: dict[str, Answer | Callable[[dict[str, list[str]]], Answer]] = {}
        self.asked: list[str] = []
        self.patched: list[Object] = []
        self.patch_answer: Answer | None = None
        self.set_runs(training_run())
        self.answers[EVENTS] = (200, {"items": []})

    def set_runs(self, *runs: Object) -> None:
        self.answers[RUNS] = (200, {"items": list(runs)})
        self.answers[f"/apis/{names.API_VERSION}/{names.PLURAL}"] = (200, {"items": []})
        for run in runs:
            self.answers[f"{RUNS}/{run['metadata']['name']}"] = (200, run)

    def refuse(self, path: str, status: int, message: str) -> None:
        self.answers[path] = (status, {"kind": "Status", "message": message})

    def answer(self, target: str) -> Answer:
        self.asked.append(target)
        parts = urlsplit(target)
        found = self.answers.get(parts.path)
        if found is None:
            return 404, {"kind": "Status", "message": "the server could not find it"}
        return found(parse_qs(parts.query)) if callable(found) else found


@contextmanager
def serving(server: ApiServer) -> Iterator[int]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(*server.answer(self.path))

        def do_PATCH(self) -> None:
            length = int(self.headers["Content-Length"])
            server.patched.append(json.loads(self.rfile.read(length)))
            self._answer(*(server.patch_answer or server.answer(self.path)))

        def _answer(self, status: int, body: Object | str) -> None:
            data = (body if isinstance(body, str) else json.dumps(body)).encode()
            with suppress(ConnectionError):  # the command may have ended
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                length = len(data) + isinstance(body, CutShort)
                self.send_header("Content-Length", str(length))
                self.end_headers()
                self.wfile.write(data)

        def log_message(self, *_: object) -> None:
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    httpd.daemon_threads = True
    threading.Thread(target=httpd.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield httpd.server_address[1]
    finally:
        httpd.shutdown()
        httpd.server_close()


def kubeconfig(path: Path, port: int) -> Path:
    """One cluster, and one context with a namespace."""
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "u", "user": {"token": "secret-token"}}],
        "contexts": [
            {"name": "lab", "context": {"cluster": "c", "user": "u", "namespace": NAMESPACE}}
        ],
        "current-context": "lab",
    }
    path.write_text(json.dumps(document))
    return path
