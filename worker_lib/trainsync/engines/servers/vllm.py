"""Drives a ``vllm serve`` that has the engine `trainsync.integrations.vllm`.

Start the server with ``VLLM_SERVER_DEV_MODE=1`` and ``--weight-transfer-config '{"backend":
"trainsync"}'``, on this host, with this process's user. Its endpoints are not for strangers: anyone
who reaches them can pause the server.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from http import HTTPStatus
from types import TracebackType
from typing import Any, Final, Self

import httpx

from trainsync.engines.servers.base import PauseMode, Update
from trainsync.engines.servers.calls import ServerCalls
from trainsync.engines.servers.errors import (
    KEPT,
    ServerError,
    ServerPausedError,
    UpdateRefusedError,
)
from trainsync.engines.servers.preparing import (
    ABANDON,
    PREPARE,
    PREPARED,
    Preparation,
    PreparationOutcome,
    of_all,
)
from trainsync.engines.servers.sessions import session_of
from trainsync.engines.servers.tags import version_in
from trainsync.failpoints import failpoint
from trainsync.weights.staging.index import StagedReference

_SESSION_OPEN: Final = "already active"
_PROMPTS: Final = 16  # of one request for log-probabilities
_ASK_SECONDS: Final = 0.05  # between questions: for each, the server's next step waits


class VLLMServer:
    """See `ServerDriver`.

    Requests that run keep their tokens, and what the older weights computed for them is computed
    anew: no token after the update comes from a cache of older weights.

    Args:
        url: such as ``http://127.0.0.1:8000``.
        pause: see `PauseMode`.
        timeout: seconds for an update from its first call to its last but one, and for every other
            call. With ``wait`` it must hold the longest request.
        resume_timeout: seconds for the last call of an update.
        transport: of httpx; for tests.
    """

    def __init__(
        self,
        url: str,
        *,
        pause: PauseMode = "keep",
        timeout: float = 600.0,
        resume_timeout: float = 30.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._pause = pause
        self._timeout = timeout
        self._resume_timeout = resume_timeout
        self._calls = ServerCalls(url, transport)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close connections; the server stays as it is."""
        self._calls.close()

    def tag(self) -> str:
        """See `ServerDriver`."""
        answer = self._calls.ask("GET", "/weight_info", self._deadline())
        said = answer.get("weight_version")
        if not isinstance(said, str):
            raise ServerError(f"{self._calls.name} has no weight version: {answer!r}")
        return said

    def version(self) -> int | None:
        """See `ServerDriver`."""
        return version_in(self.tag())

    def is_paused(self) -> bool:
        """See `ServerDriver`."""
        answer = self._calls.ask("GET", "/is_paused", self._deadline())
        if not isinstance(answer.get("is_paused"), bool):
            raise ServerError(f"{self._calls.name} does not say whether it is paused: {answer!r}")
        return bool(answer["is_paused"])

    def is_alive(self) -> bool:
        """See `ServerDriver`."""
        return self._calls.status("GET", "/health", self._deadline()) == HTTPStatus.OK

    def checksums(self) -> Mapping[str, str]:
        """A digest of each of its tensors, under vLLM's own names, as they are in memory.

        Raises:
            ServerError: no such answer.
        """
        body = {"action": "checksum"}
        answer = self._calls.ask("POST", "/weight_checker", self._deadline(), body).get("checksums")
        if not isinstance(answer, dict) or not answer:
            raise ServerError(f"{self._calls.name} gave no checksums: {answer!r}")
        return {str(name): str(digest) for name, digest in answer.items()}

    def logprobs(self, prompts: Sequence[Sequence[int]]) -> tuple[tuple[float, ...], ...]:
        """See `ServerDriver`. Several requests, which generate one token for each prompt."""
        deadline = self._deadline()
        found: list[tuple[float, ...]] = []
        for begin in range(0, len(prompts), _PROMPTS):
            asked = [list(prompt) for prompt in prompts[begin : begin + _PROMPTS]]
            body = {"prompt": asked, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
            body |= self._asked()
            answer = self._calls.ask("POST", "/v1/completions", deadline, body)
            try:
                found += prompt_logprobs(asked, answer)
            except (KeyError, TypeError, ValueError) as error:
                raise ServerError(
                    f"{self._calls.name} gave no log-probabilities of the prompts: {error!r}"
                ) from error
        return tuple(found)

    def prepare(
        self, seconds: float, version: int, staged: StagedReference, go_on: Callable[[], None]
    ) -> Preparation:
        """Let the server load a version into memory beside its weights, while it serves.

        An `update` to that version then only puts them in their place. Without, or after any other
        outcome than ``PREPARED``, it loads them while the server is paused.

        Args:
            seconds: for the preparation. The server keeps what it prepared for as long, and for an
                update's ``timeout``.
            go_on: called between questions; what it raises ends the preparation.

        Raises:
            UpdateRefusedError: the version cannot be loaded at all, or the server does not answer.
        """
        started = time.monotonic()
        try:
            body = {"init_info": staged.as_dict()}
            self._calls.ask("POST", "/init_weight_transfer_engine", self._deadline(), body)
        except ServerError as error:
            raise UpdateRefusedError(f"version {version}: {error}") from error
        try:
            ended = self._workers(PREPARE, seconds=seconds + self._timeout)
            while ended is None and time.monotonic() < started + seconds:
                go_on()
                time.sleep(_ASK_SECONDS)
                ended = self._workers(PREPARED)
            if ended is None:
                self._workers(ABANDON)
                ended = PreparationOutcome.LATE, f"it took longer than {seconds:g} s"
        except ServerError as error:
            ended = PreparationOutcome.IMPOSSIBLE, str(error)
        except BaseException:
            with suppress(ServerError):
                self._workers(ABANDON)
            raise
        return Preparation(*ended, time.monotonic() - started)

    def _workers(self, method: str, **arguments: float) -> tuple[PreparationOutcome, str] | None:
        """The outcome that a call of all workers tells, see `of_all`. Raises `ServerError`."""
        body = {"method": method, "kwargs": arguments}
        answer = self._calls.ask("POST", "/collective_rpc", self._deadline(), body)
        try:
            return of_all(answer["results"])
        except (KeyError, TypeError, ValueError) as error:
            raise ServerError(
                f"{self._calls.name} does not say how {method} went: {error!r}"
            ) from error

    def update(self, version: int, staged: StagedReference, tag: str | None = None) -> Update:
        """See `ServerDriver`."""
        deadline = self._deadline()
        started = time.monotonic()
        try:
            self._look(staged, deadline)
            was_paused = self.is_paused()
        except ServerError as error:
            raise UpdateRefusedError(f"version {version}: {error}") from error
        paused = time.monotonic()
        failpoint("server.pausing")
        try:
            self._replace(str(version) if tag is None else tag, staged, deadline)
        except ServerError as error:
            # A server that was paused before may hold anything: the update that paused it failed.
            if KEPT not in str(error) or was_paused:
                raise ServerPausedError(
                    f"version {version}: {error}; {self._calls.name} is left paused"
                ) from error
            self._resume(version, error)
            raise UpdateRefusedError(f"version {version}: {error}") from error
        self._resume(version, None)
        return Update(version, paused - started, time.monotonic() - paused)

    def _asked(self) -> dict[str, Any]:
        """The model that `logprobs` asks, as options of a request; without, the base model."""
        return {}

    def _look(self, staged: StagedReference, deadline: float) -> None:
        """Let the server see that it can load a version, which it then is to. Raises `ServerError`:
        its weights are as they were."""
        body = {"init_info": staged.as_dict()}
        self._calls.ask("POST", "/init_weight_transfer_engine", deadline, body)

    def _replace(self, tag: str, staged: StagedReference, deadline: float) -> None:
        """From the call to pause to the last one before resume."""
        try:
            self._calls.ask("POST", f"/pause?mode={self._pause}", deadline)
        except ServerError as error:
            raise ServerError(f"{KEPT}: {error}") from error
        failpoint("server.paused")
        self._load(staged, deadline)
        failpoint("server.loaded")
        answer = self._calls.ask(
            "POST", "/reset_prefix_cache?reset_running_requests=true", deadline
        )
        if answer.get("success") is not True:
            raise ServerError(f"{self._calls.name} kept its prefix cache: {answer!r}")
        self._name(tag, deadline)
        if (said := self.tag()) != tag:
            raise ServerError(f"{self._calls.name} says that it has version {said}, not {tag}")
        failpoint("server.named")

    def _load(self, staged: StagedReference, deadline: float) -> None:
        """Let the paused server load the version. Raises `ServerError`, with `KEPT` if its weights
        are as they were."""
        try:
            self._calls.ask("POST", f"/{session_of(staged)}", deadline)
        except ServerError as error:
            # Of a driver that died: the session has no state, so it is as good as a new one. The
            # engine closes one by which it does not know the draft model that comes.
            if _SESSION_OPEN not in str(error):
                raise ServerError(f"{KEPT}: {error}") from error
        body = {"update_info": staged.as_dict()}
        self._calls.ask("POST", "/update_weights", deadline, body)

    def _name(self, tag: str, deadline: float) -> None:
        """End the load, and give the weights their name."""
        self._calls.ask("POST", "/finish_weight_update", deadline, {"weight_version": tag})

    def _resume(self, version: int, cause: ServerError | None) -> None:
        failpoint("server.resuming")
        try:
            self._calls.ask("POST", "/resume", time.monotonic() + self._resume_timeout)
        except ServerError as error:
            before = "" if cause is None else f"{cause}; then "
            raise ServerPausedError(
                f"version {version}: {before}{self._calls.name} did not resume: {error}"
            ) from error

    def _deadline(self) -> float:
        return time.monotonic() + self._timeout


def prompt_logprobs(
    prompts: Sequence[Sequence[int]], answer: Mapping[str, Any]
) -> list[tuple[float, ...]]:
    """The log-probabilities of the prompts' own tokens in an answer of ``/v1/completions``.

    Raises:
        KeyError, TypeError, ValueError: it does not say that of each of them.
    """
    choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
    found = []
    for prompt, choice in zip(prompts, choices, strict=True):
        rows = zip(prompt[1:], choice["prompt_logprobs"][1:], strict=True)
        found.append(tuple(float(row[str(token)]["logprob"]) for token, row in rows))
    return found
