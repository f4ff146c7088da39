"""A server with weights of its own, in a process of its own, with the endpoints of ``vllm serve``.

It maps what an agent has staged and copies it, tensor by tensor, into the weights with which it
generates. Nothing but the pause keeps a token from being made meanwhile, and nothing but the reset
of its cache keeps what older weights computed from being used: a driver that forgets either gets
mixed answers, as a client sees. Calls that change it are done one after the other, as by vLLM's
engine.
"""

import json
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

from trainsync.engines.servers.errors import KEPT
from trainsync.weights.staging.index import StagedReference

from tests.faults.inject import kill_me, stop_me
from tests.faults.processes import Line
from tests.faults.serving import model
from tests.faults.serving.holding import (
    EngineDeadError,
    Holder,
    Tensors,
    Workers,
    prompt_logprobs,
)

LOADING: Final = "/update_weights"
PROVING: Final = "/v1/completions"
START_TAG: Final = "default"
TENSORS: Final = len(model.weights_of(model.START))

_DROP_SECONDS: Final = 0.5  # between two bytes of a slow answer
_LONGEST_SECONDS: Final = 30.0
_DEAD_SECONDS: Final = 0.3  # from the death of a worker to the server's end


class How(StrEnum):
    """The kind of fault."""

    KILLED = "killed"
    STOPPED = "stopped"
    HANGS = "hangs"
    """Its engine does nothing until it is healed; other calls are answered."""
    FAILS = "500"
    DRIPS = "drips"
    """A byte of the answer now and then."""
    WRONG = "another model"
    """Loads other weights than it says."""


@dataclass(frozen=True)
class Fault:
    """At a path; while weights are loaded, after ``tensors`` of them."""

    path: str
    how: How
    tensors: int = 0
    worker: int | None = None
    """Which one is killed, of a server that has workers, and whose tensors count."""


class Log:
    """What happened, with monotonic times; lines of JSON that a kill leaves whole."""

    def __init__(self, path: Path) -> None:
        self._fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def add(self, event: str, **fields: Any) -> None:
        """Write a line."""
        record = {"event": event, "at": time.monotonic(), **fields}
        os.write(self._fd, json.dumps(record).encode() + b"\n")


def read_log(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a `Log`; none before it is made."""
    try:
        lines = path.read_bytes().split(b"\n")
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines[:-1]]


class Server:
    """Answers at ``port``.

    Args:
        memory: where agents stage.
        fault: strikes once it is armed, until it is healed.
        workers: whether two processes have the weights; to be made before other threads then. When
            one of them dies every call fails, and soon this process ends, with 1.

    Attributes:
        made: how many tokens it has made.
        workers: the processes, or None.
    """

    def __init__(
        self, port: int, memory: Path, log: Log, fault: Fault | None, *, workers: bool = False
    ) -> None:
        self.made = 0
        self._log = log
        self._fault = fault
        self._dead = threading.Event()
        self.workers = Workers(memory, self._died) if workers else None
        whole = tuple(model.weights_of(model.START))
        self._held: Holder = self.workers or Tensors(memory, whole, self._copying)
        self._armed = threading.Event()
        self._healed = threading.Event()
        self._tag = START_TAG
        self._step = threading.Lock()
        self._running = threading.Event()
        self._running.set()
        self._caches = 0  # how often they were reset
        self._session = self._loaded = False
        self._calls: queue.Queue[Callable[[], None]] = queue.Queue()
        threading.Thread(target=self._engine, daemon=True).start()
        http = _http_server(self, port)
        log.add("started")
        threading.Thread(target=http.serve_forever, args=(0.02,), daemon=True).start()

    def arm(self) -> None:
        """From now on the fault strikes."""
        self._armed.set()

    def heal(self) -> None:
        """From now on it does not, and what hangs goes on."""
        self._armed.clear()
        self._healed.set()

    def drips(self, path: str) -> bool:
        """Whether the answer comes in drops."""
        return self._strikes(path, How.DRIPS)

    def answer(self, path: str, body: Any) -> tuple[int, Any]:
        """Status and answer of one request."""
        try:
            if self._dead.is_set():
                raise EngineDeadError
            return self._answer(path, body)
        except EngineDeadError:
            return 500, {"error": {"message": "the engine is dead"}}

    def _answer(self, path: str, body: Any) -> tuple[int, Any]:
        if path == "/weight_info":
            return 200, {"weight_version": self._tag}
        if path == "/is_paused":
            return 200, {"is_paused": not self._running.is_set()}
        if path == "/generate":
            return 200, {"tokens": self._generate(**body)}
        if path == PROVING:
            if self._strikes(path, How.FAILS):
                return 500, {"error": {"message": "the engine is dead"}}
            self._strike_process(path)
            rows = self._prompts(body["prompt"])
            choices = [{"index": n, "prompt_logprobs": row} for n, row in enumerate(rows)]
            return 200, {"choices": choices}
        return self._in_engine(path, body)

    # -- faults -----------------------------------------------------------------------------

    def _strikes(self, path: str, how: How, tensors: int = 0) -> bool:
        fault = self._fault
        strikes = (
            self._armed.is_set()
            and fault is not None
            and (fault.path, fault.how, fault.tensors) == (path, how, tensors)
        )
        if strikes:
            self._log.add("struck", path=path)
        return strikes

    def _strike_process(self, path: str, tensors: int = 0) -> None:
        if self._strikes(path, How.KILLED, tensors):
            self._kill()
        if self._strikes(path, How.STOPPED, tensors):
            self._armed.clear()
            stop_me()
        if self._strikes(path, How.HANGS, tensors):
            self._healed.wait(_LONGEST_SECONDS)

    def _kill(self) -> None:
        fault = self._fault
        if fault is None or fault.worker is None or self.workers is None:
            kill_me()
        elif fault.path == LOADING:
            self.workers.kill_at(fault.worker, fault.tensors)
        else:
            self.workers.kill(fault.worker)

    def _copying(self, number: int) -> None:
        self._strike_process(LOADING, number)

    def _died(self) -> None:
        self._dead.set()
        self._log.add("dead")
        time.sleep(_DEAD_SECONDS)  # a server that ends answers for a while
        os._exit(1)

    # -- the engine -------------------------------------------------------------------------

    def _engine(self) -> None:
        while True:
            self._calls.get()()

    def _in_engine(self, path: str, body: Any) -> tuple[int, Any]:
        answers: queue.Queue[tuple[int, Any] | EngineDeadError] = queue.Queue()

        def call() -> None:
            try:
                answers.put(self._control(path, body))
            except EngineDeadError as error:
                answers.put(error)
            except Exception as error:  # noqa: BLE001 - as a server: it is the answer
                answers.put((500, {"error": {"message": str(error)}}))

        self._calls.put(call)
        answer = answers.get()
        if isinstance(answer, EngineDeadError):
            raise answer
        return answer

    def _control(self, path: str, body: Any) -> tuple[int, Any]:
        if self._strikes(path, How.FAILS):
            return 500, {"error": {"message": "Internal Server Error"}}
        if path != LOADING:
            self._strike_process(path)
        match path:
            case "/pause":
                with self._step:
                    self._running.clear()
                self._log.add("paused")
            case "/resume":
                self._log.add("resumed")
                self._running.set()
            case "/init_weight_transfer_engine":
                self._held.prepare(StagedReference(**body["init_info"]))
            case "/start_weight_update":
                if self._session:
                    raise RuntimeError("a weight update is already active")
                self._session, self._loaded = True, False
            case "/update_weights":
                self._load(StagedReference(**body["update_info"]))
            case "/reset_prefix_cache":
                with self._step:
                    self._caches += 1
                return 200, {"success": True}
            case "/finish_weight_update":
                if not self._session or not self._loaded:
                    raise RuntimeError(f"{KEPT}: no weights came in this update")
                self._session = self._loaded = False
                self._tag = body["weight_version"]
                self._log.add("named", tag=self._tag)
            case _:
                return 404, {"error": {"message": "Not Found"}}
        return 200, {"message": "done"}

    def _load(self, reference: StagedReference) -> None:
        self._loaded = False
        if self.workers is not None and self._fault is not None:
            self._strike_process(LOADING, self._fault.tensors)
        self._held.load(reference, 1.5 if self._strikes(LOADING, How.WRONG) else 1.0)
        self._loaded = True

    # -- answers ----------------------------------------------------------------------------

    def _prompts(self, prompts: list[list[int]]) -> list[list[dict[str, Any] | None]]:
        found = prompt_logprobs(self._held, prompts)
        return [
            [None, *({str(t): {"logprob": value}} for t, value in zip(p[1:], row, strict=True))]
            for p, row in zip(prompts, found, strict=True)
        ]

    def _generate(self, prompt: list[int], count: int, seconds: float) -> list[list[Any]]:
        """(token, log-probability, name of the weights) of each new token."""
        tokens, answer = list(prompt), []
        state, seen, caches = model.begin(), 0, self._caches
        while len(answer) < count:
            self._running.wait(_LONGEST_SECONDS)
            with self._step:
                if not self._running.is_set():
                    continue
                if caches != self._caches:
                    state, seen, caches = model.begin(), 0, self._caches
                for token in tokens[seen:]:
                    state = self._held.read(state, token)
                seen = len(tokens)
                found = self._held.logprobs(state)
                tokens.append(int(found.argmax()))
                answer.append([tokens[-1], float(found[tokens[-1]]), self._tag])
                self.made += 1
            time.sleep(seconds / count)
        return answer


def _http_server(server: Server, port: int) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        timeout = _LONGEST_SECONDS

        def _handle(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length) or b"null")
            path = self.path.partition("?")[0]
            status, answer = server.answer(path, body)
            data = json.dumps(answer).encode()
            head = f"HTTP/1.1 {status} .\r\nConnection: close\r\nContent-Length: {len(data)}\r\n"
            whole = f"{head}\r\n".encode() + data
            self.close_connection = True
            while server.drips(path) and whole:
                self.wfile.write(whole[:1])
                whole = whole[1:]
                time.sleep(_DROP_SECONDS)
            self.wfile.write(whole)

        do_GET = do_POST = _handle  # noqa: N815 - as http.server names them

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

    class Listening(ThreadingHTTPServer):
        daemon_threads = True
        block_on_close = False

        def handle_error(self, request: Any, client_address: Any) -> None:
            pass  # the client went

    return Listening(("127.0.0.1", port), Handler)


def serving(
    line: Line, port: int, memory: Path, log: Path, fault: Fault | None, workers: bool
) -> None:
    """A server until ``end``; obeys ``arm`` and ``heal``. Says ``listening`` with its workers."""
    server = Server(port, memory, Log(log), fault, workers=workers)
    line.say("listening", [] if server.workers is None else server.workers.pids)
    while (word := line.hear(600)) != "end":
        if word == "arm":
            server.arm()
            line.say("armed")
        elif word == "heal":
            server.heal()
        else:
            raise ValueError(word)
    if server.workers is not None:
        server.workers.end()
