"""The endpoints of an SGLang server that a driver calls, over HTTP: in a test's process, or in one
of its own, ``fake_sglang.py MODEL``, that prints its port and may be killed.

As SGLang 0.5.23 it keeps tensors that a file lacks, and ends when it cannot load one.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

Fault = Callable[[], tuple[int, Any] | None]
"""Called at a request: status and answer in its stead, or None: go on."""
Tensors = dict[str, tuple[str, list[int], bytes]]
"""By name: dtype as safetensors names it, shape and bytes."""

_ROUTES = frozenset({
    "/begin_weight_update", "/end_weight_update", "/update_weights_from_tensor",
    "/init_weights_update_group", "/destroy_weights_update_group",
    "/update_weights_from_distributed", "/update_weight_version",
})  # fmt: skip


def read_tensors(file: Path) -> Tensors:
    """Of a safetensors file."""
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    found = {}
    for name, row in header.items():
        if name != "__metadata__":
            begin, end = row["data_offsets"]
            found[name] = row["dtype"], row["shape"], data[start + begin : start + end]
    return found


def sum_of(tensors: Tensors, prompt: Sequence[int]) -> list[float]:
    """Log-probabilities of a prompt's tokens from the second on: different with other bytes."""
    total = sum(sum(data) for _, _, data in tensors.values())
    return [-1 - (total % 97) / 97 - token / 1000 for token in prompt[1:]]


class FakeSGLang:
    """A server on a port of its own, until `stop`.

    Args:
        routes: makes those for tensors and groups (`FakeRoutes`), with torch; without: it has none.

    Attributes:
        tensors: that it generates with.
        logprobs: what it answers for a prompt.
        faults: by path.
        parallel: how many of which parts ``/server_info`` names.
        calls: paths, in order.
        routes: of this start.
        starting: whether it answers and is not warm yet.
        ended: whether it died of what it was to load.
    """

    def __init__(
        self, model: Path, dtype: str = "auto", routes: Callable[[], Any] = lambda: None
    ) -> None:
        self._make_routes = routes
        self._model = model
        self._dtype = dtype
        self.parallel = {"tp_size": 1, "dp_size": 1, "pp_size": 1, "nnodes": 1}
        self.faults: dict[str, Fault] = {}
        self.calls: list[str] = []
        self.bodies: dict[str, Any] = {}
        self.logprobs: Callable[[Tensors, Sequence[int]], list[float]] = sum_of
        self.port = 0
        self._http: ThreadingHTTPServer | None = None
        self.start()

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start with the weights of its model, at the same port as before."""
        self.tag = "default"
        self.paused = False
        self.starting = False
        self.ended = False
        self.started = time.time()
        self.routes = self._make_routes()
        self.tensors = read_tensors(self._model / "model.safetensors")
        server = self

        class Handler(BaseHTTPRequestHandler):
            timeout = 60

            def _handle(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length) or b"null")
                found = server._answer(self.path.partition("?")[0], body)
                if found is None:
                    return
                status, answer = found
                data = b"" if answer is None else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = _handle  # noqa: N815 - as http.server names them

            def log_message(self, format: str, *arguments: Any) -> None:
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            block_on_close = False

            def handle_error(self, request: Any, client_address: Any) -> None:
                pass  # the client went

        self._http = Server(("127.0.0.1", self.port), Handler)
        self.port = self._http.server_address[1]
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        """Go away."""
        if self._http is not None:
            self._http.shutdown()
            self._http.server_close()
            self._http = None

    def _answer(self, path: str, body: Any) -> tuple[int, Any] | None:
        """Status and answer; None: the connection ends without."""
        self.calls.append(path)
        self.bodies[path] = body
        fault = self.faults.get(path)
        instead = None if fault is None else fault()
        if instead is not None:
            return instead
        if self.routes is not None and path in _ROUTES:
            return self._by_route(path, body)
        match path:
            case "/model_info":
                return 200, {"weight_version": self.tag, "model_path": str(self._model)}
            case "/server_info":
                return 200, {
                    "model_path": str(self._model),
                    "dtype": self._dtype,
                    "startup_time": self.started,
                    **self.parallel,
                }
            case "/ready":
                return (503 if self.paused or self.starting else 200), None
            case "/ping":
                return (503 if self.starting else 200), None
            case "/pause_generation":
                self.paused = True
            case "/continue_generation":
                self.paused = False
            case "/update_weights_from_disk":
                return self._update(body)
            case "/weights_checker":
                return 200, self._checksums()
            case "/generate":
                return 200, [self._generated(prompt) for prompt in body["input_ids"]]
        return 200, {"status": "ok"}

    def _update(self, body: Any) -> tuple[int, Any] | None:
        assert self.paused, "an update of a server that generates"
        assert body["flush_cache"] is True
        file = Path(body["model_path"]) / "model.safetensors"
        if not file.is_file():
            message = f"Failed to get weights iterator: Cannot find any model weights with {file}"
            return 400, {"success": False, "message": message}
        found = read_tensors(file)
        for name, (_, shape, _) in found.items():
            if name in self.tensors and self.tensors[name][1] != shape:
                self.ended = True
                return None
        self.tensors = {name: found.get(name, had) for name, had in self.tensors.items()}
        self.tag = body["weight_version"]
        return 200, {"success": True, "message": "Succeeded to update model weights."}

    def _by_route(self, path: str, body: Any) -> tuple[int, Any]:
        match path:
            case "/begin_weight_update":
                assert self.paused, "an update of a server that generates"
                return self.routes.begin()
            case "/end_weight_update":
                return self.routes.end()
            case "/update_weights_from_tensor":
                return self._loaded(*self.routes.from_tensor(body))
            case "/init_weights_update_group":
                return self.routes.init(body)
            case "/destroy_weights_update_group":
                return self.routes.destroy(body)
            case "/update_weights_from_distributed":
                return self._loaded(*self.routes.from_distributed(body))
        assert path == "/update_weight_version"
        assert body["abort_all_requests"] is False
        self.tag = body["new_version"]
        return 200, {"success": True, "message": "Weight version updated"}

    def _loaded(self, answer: tuple[int, Any], tensors: Tensors) -> tuple[int, Any]:
        self.tensors = {name: tensors.get(name, had) for name, had in self.tensors.items()}
        return answer

    def _checksums(self) -> dict[str, Any]:
        sums = {name: f"{hash(data):x}" for name, (_, _, data) in self.tensors.items()}
        place = {"role": "target", "tp_rank": 0, "dp_rank": 0, "pp_rank": 0}
        return {"success": True, "ranks": [{"checksums": sums, "parallelism_info": [place]}]}

    def _generated(self, prompt: Sequence[int]) -> dict[str, Any]:
        scores = [None, *self.logprobs(self.tensors, prompt)]
        rows = [[score, token, None] for score, token in zip(scores, prompt, strict=True)]
        return {"text": "", "meta_info": {"input_token_logprobs": rows}}


def _main() -> None:
    server = FakeSGLang(Path(sys.argv[1]))

    def hang() -> None:
        sys.stdout.write("hangs\n")
        sys.stdout.flush()
        time.sleep(3600)

    for path in sys.argv[2:]:
        server.faults[path] = hang
    sys.stdout.write(f"{server.port}\n")
    sys.stdout.flush()
    while os.getppid() > 1:
        time.sleep(0.1)


if __name__ == "__main__":
    _main()
