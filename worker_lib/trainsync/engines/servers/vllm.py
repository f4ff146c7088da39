"""Drives a ``vllm serve`` that has the engine `trainsync.integrations.vllm`.

Start the server with ``VLLM_SERVER_DEV_MODE=1`` and ``--weight-transfer-config '{"backend":
"trainsync"}'``, on this host, with this process's user. Its endpoints are not for strangers: anyone
who reaches them can pause the server.
"""

import json
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Literal, Self

import httpx

from trainsync.engines.servers.base import Update
from trainsync.engines.servers.errors import (
    KEPT,
    ServerError,
    ServerPausedError,
    UpdateRefusedError,
)
from trainsync.engines.servers.tags import version_in
from trainsync.failpoints import failpoint
from trainsync.weights.staging.index import StagedReference

PauseMode = Literal["keep", "wait", "abort"]
"""What becomes of requests that run: they go on after the update, it waits for them, or they end at
once with what they have."""

_SESSION_OPEN: Final = "already active"
_LONGEST_MESSAGE: Final = 1000
_LARGEST_ANSWER: Final = 64 << 20  # checksums of a hundred thousand tensors
_PROMPTS: Final = 16  # of one request for log-probabilities


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
        self._http = httpx.Client(
            base_url=url,
            transport=transport,
            # A proxy of the environment is for calls that leave the host.
            trust_env=False,
            # After an answer of 500 the server resets the connection that it kept open.
            headers={"Connection": "close"},
        )

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
        self._http.close()

    def tag(self) -> str:
        """See `ServerDriver`."""
        answer = self._call("GET", "/weight_info", self._deadline())
        said = answer.get("weight_version")
        if not isinstance(said, str):
            raise ServerError(f"{self._name} has no weight version: {answer!r}")
        return said

    def version(self) -> int | None:
        """See `ServerDriver`."""
        return version_in(self.tag())

    def is_paused(self) -> bool:
        """See `ServerDriver`."""
        answer = self._call("GET", "/is_paused", self._deadline())
        if not isinstance(answer.get("is_paused"), bool):
            raise ServerError(f"{self._name} does not say whether it is paused: {answer!r}")
        return bool(answer["is_paused"])

    def checksums(self) -> Mapping[str, str]:
        """See `ServerDriver`."""
        body = {"action": "checksum"}
        answer = self._call("POST", "/weight_checker", self._deadline(), body).get("checksums")
        if not isinstance(answer, dict) or not answer:
            raise ServerError(f"{self._name} gave no checksums: {answer!r}")
        return {str(name): str(digest) for name, digest in answer.items()}

    def logprobs(self, prompts: Sequence[Sequence[int]]) -> tuple[tuple[float, ...], ...]:
        """See `ServerDriver`. Several requests, which generate one token for each prompt."""
        deadline = self._deadline()
        found: list[tuple[float, ...]] = []
        for begin in range(0, len(prompts), _PROMPTS):
            asked = [list(prompt) for prompt in prompts[begin : begin + _PROMPTS]]
            body = {"prompt": asked, "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0}
            answer = self._call("POST", "/v1/completions", deadline, body)
            try:
                found += prompt_logprobs(asked, answer)
            except (KeyError, TypeError, ValueError) as error:
                raise ServerError(
                    f"{self._name} gave no log-probabilities of the prompts: {error!r}"
                ) from error
        return tuple(found)

    def update(self, version: int, staged: StagedReference, tag: str | None = None) -> Update:
        """See `ServerDriver`."""
        deadline = self._deadline()
        started = time.monotonic()
        body = staged.as_dict()
        try:
            self._call("POST", "/init_weight_transfer_engine", deadline, {"init_info": body})
            was_paused = self.is_paused()
        except ServerError as error:
            raise UpdateRefusedError(f"version {version}: {error}") from error
        paused = time.monotonic()
        failpoint("server.pausing")
        try:
            self._replace(str(version) if tag is None else tag, body, deadline)
        except ServerError as error:
            # A server that was paused before may hold anything: the update that paused it failed.
            if KEPT not in str(error) or was_paused:
                raise ServerPausedError(
                    f"version {version}: {error}; {self._name} is left paused"
                ) from error
            self._resume(version, error)
            raise UpdateRefusedError(f"version {version}: {error}") from error
        self._resume(version, None)
        return Update(version, paused - started, time.monotonic() - paused)

    def _replace(self, tag: str, body: Mapping[str, str], deadline: float) -> None:
        """From the call to pause to the last one before resume."""
        try:
            self._call("POST", f"/pause?mode={self._pause}", deadline)
        except ServerError as error:
            raise ServerError(f"{KEPT}: {error}") from error
        try:
            self._call("POST", "/start_weight_update", deadline)
        except ServerError as error:
            # Of a driver that died: the session has no state, so it is as good as a new one.
            if _SESSION_OPEN not in str(error):
                raise ServerError(f"{KEPT}: {error}") from error
        self._call("POST", "/update_weights", deadline, {"update_info": body})
        failpoint("server.loaded")
        answer = self._call("POST", "/reset_prefix_cache?reset_running_requests=true", deadline)
        if answer.get("success") is not True:
            raise ServerError(f"{self._name} kept its prefix cache: {answer!r}")
        self._call("POST", "/finish_weight_update", deadline, {"weight_version": tag})
        if (said := self.tag()) != tag:
            raise ServerError(f"{self._name} says that it has version {said}, not {tag}")

    def _resume(self, version: int, cause: ServerError | None) -> None:
        failpoint("server.resuming")
        try:
            self._call("POST", "/resume", time.monotonic() + self._resume_timeout)
        except ServerError as error:
            before = "" if cause is None else f"{cause}; then "
            raise ServerPausedError(
                f"version {version}: {before}{self._name} did not resume: {error}"
            ) from error

    @property
    def _name(self) -> str:
        return str(self._http.base_url).rstrip("/")

    def _deadline(self) -> float:
        return time.monotonic() + self._timeout

    def _call(
        self, method: str, path: str, deadline: float, body: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """The JSON object of an answer.

        Raises:
            ServerError: none by ``deadline`` (`time.monotonic`), or not one of success.
        """
        left = deadline - time.monotonic()
        what = f"{self._name}{path.partition('?')[0]}"
        if left <= 0:
            raise ServerError(f"{what} was not called: the update's time is over")
        try:
            with self._http.stream(method, path, json=body, timeout=left) as answer:
                said = _read(answer, deadline)
            decoded = json.loads(said)
        except httpx.TimeoutException as error:
            raise ServerError(f"{what} did not answer within {left:.0f} s") from error
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise ServerError(f"{what} cannot be called: {error}") from error
        except ValueError as error:
            raise ServerError(f"{what} answered {answer.status_code} without JSON") from error
        if not answer.is_success or not isinstance(decoded, dict):
            raise ServerError(f"{what} answered {answer.status_code}: {said[:_LONGEST_MESSAGE]!r}")
        return decoded


def prompt_logprobs(
    prompts: Sequence[Sequence[int]], answer: Mapping[str, Any]
) -> list[tuple[float, ...]]:
    """What an answer of ``/v1/completions`` says of the prompts' own tokens.

    Raises:
        KeyError, TypeError, ValueError: it does not say that of each of them.
    """
    choices = sorted(answer["choices"], key=lambda choice: int(choice["index"]))
    found = []
    for prompt, choice in zip(prompts, choices, strict=True):
        rows = zip(prompt[1:], choice["prompt_logprobs"][1:], strict=True)
        found.append(tuple(float(row[str(token)]["logprob"]) for token, row in rows))
    return found


def _read(answer: httpx.Response, deadline: float) -> bytes:
    """The body; httpx's own timeout begins anew with each piece."""
    said = b""
    for piece in answer.iter_bytes():
        said += piece
        if time.monotonic() > deadline or len(said) > _LARGEST_ANSWER:
            raise httpx.ReadTimeout("the answer did not end", request=answer.request)
    return said
