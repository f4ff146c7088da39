"""The endpoints of ``vllm serve`` that a driver calls, over HTTP; weights come as staged."""

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from trainsync.engines.servers.errors import KEPT
from trainsync.weights.errors import WeightsError
from trainsync.weights.staging.index import StagedReference
from trainsync.weights.staging.reading import StagedReader

Fault = Callable[[], tuple[int, Any] | None]
"""Called at a request: status and answer in its stead, or None: go on."""


def logprobs_of(weights: Mapping[str, torch.Tensor], prompt: Sequence[int]) -> list[float]:
    """Of a model with these weights, for the prompt's tokens from the second on."""
    total = sum(float(tensor.double().mean()) for tensor in weights.values())
    return [-1 - (total * (1 + token + place)) % 5 for place, token in enumerate(prompt[1:])]


class FakeServer:
    """A server on a port of its own, until `stop`.

    Args:
        others: the memory of each other host of its engine.

    Attributes:
        weights: that it generates with; None: those that it began with.
        loads_as: what becomes of weights as they are loaded.
        loads: how many versions it loaded.
        faults: by path; the change of them needs no lock.
        calls: paths, in order.
        prepares: the answer of its worker, asked whether a version is prepared; None: it does not
            know the question.
    """

    def __init__(
        self,
        memory: Path,
        host: str = "127.0.0.1",
        port: int = 0,
        others: Sequence[Path] = (),
    ) -> None:
        self._memory = memory
        self._others = others
        self._host = host
        self.faults: dict[str, Fault] = {}
        self.calls: list[str] = []
        self.loads = 0
        self.prepares: Callable[[], Mapping[str, Any]] | None = None
        self.loads_as: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]] = dict
        self.port = port
        self._http: ThreadingHTTPServer | None = None
        self.start()

    @property
    def url(self) -> str:
        """Where it answers."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start with the weights of its checkpoint, at the same port as before."""
        self.tag = "default"
        self.paused = False
        self.weights: dict[str, torch.Tensor] | None = None
        self._staged: tuple[StagedReference, dict[str, torch.Tensor]] | None = None
        self._readers = [StagedReader(memory) for memory in (self._memory, *self._others)]
        server = self

        class Handler(BaseHTTPRequestHandler):
            timeout = 30

            def _handle(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length) or b"null")
                status, answer = server._answer(self.path.partition("?")[0], body)
                data = json.dumps(answer).encode()
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

        self._http = Server((self._host, self.port), Handler)
        self.port = self._http.server_address[1]
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        """Go away."""
        if self._http is not None:
            self._http.shutdown()
            self._http.server_close()
            self._http = None

    def _answer(self, path: str, body: Any) -> tuple[int, Any]:
        self.calls.append(path)
        fault = self.faults.get(path)
        instead = None if fault is None else fault()
        if instead is not None:
            return instead
        match path:
            case "/weight_info":
                return 200, {"weight_version": self.tag}
            case "/is_paused":
                return 200, {"is_paused": self.paused}
            case "/pause":
                self.paused = True
            case "/resume":
                self.paused = False
            case "/init_weight_transfer_engine":
                reference = StagedReference.told(body["init_info"])
                try:
                    self._staged = reference, self._look(reference)
                except WeightsError as error:
                    return 500, {"error": {"message": f"{KEPT}: {error}"}}
            case "/collective_rpc":
                if self.prepares is None:
                    return 500, {"error": {"message": f"no method {body['method']}"}}
                return 200, {"results": [self.prepares()]}
            case "/update_weights":
                staged_now = self._staged
                if staged_now is None or staged_now[0].as_dict() != body["update_info"]:
                    return 500, {"error": {"message": f"{KEPT}: nothing was prepared"}}
                self.weights = self.loads_as(staged_now[1])
                self.loads += 1
            case "/finish_weight_update":
                self.tag = body["weight_version"]
            case "/v1/completions":
                choices = [
                    {"index": index, "prompt_logprobs": self._logprobs(prompt)}
                    for index, prompt in enumerate(body["prompt"])
                ]
                return 200, {"choices": choices}
            case "/reset_prefix_cache":
                return 200, {"success": True}
        return 200, {"message": "done"}

    def _look(self, reference: StagedReference) -> dict[str, torch.Tensor]:
        """Copies of the tensors, which every host must have."""
        found: list[dict[str, torch.Tensor]] = []
        for rank, reader in enumerate(self._readers):
            here = reference.on_host(rank)
            if here is None:
                raise WeightsError(f"nothing is staged on host {rank}")
            tensors = reader.open(here).tensors
            found.append({name: tensor.clone() for name, tensor in tensors.items()})
        for other in found[1:]:
            assert all(torch.equal(found[0][name], other[name]) for name in found[0])
        return found[0]

    def _logprobs(self, prompt: Sequence[int]) -> list[dict[str, Any] | None]:
        said = logprobs_of(self.weights or {}, prompt)
        rows = zip(prompt[1:], said, strict=True)
        return [None, *({str(token): {"logprob": value}} for token, value in rows)]
