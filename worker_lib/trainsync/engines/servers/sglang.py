"""Drives an SGLang server, which takes versions by one of the routes of `sglang_routes`.

SGLang says that a tensor is loaded when it is missing, and ends when it cannot load one: on an
error it "rolls back" to the files that it just failed to load. So a version is compared with the
checkpoint that the server was started from before the server hears of it.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self

import httpx

from trainsync.checkpoint.errors import MergeError
from trainsync.engines.servers.base import Update
from trainsync.engines.servers.calls import ServerCalls
from trainsync.engines.servers.errors import (
    KEPT,
    ServerError,
    ServerPausedError,
    UpdateRefusedError,
)
from trainsync.engines.servers.sglang_routes.base import LaidVersion, SGLangRoute
from trainsync.engines.servers.sglang_routes.buckets import BUCKET_BYTES
from trainsync.engines.servers.sglang_routes.making import route_of
from trainsync.engines.servers.tags import version_in
from trainsync.failpoints import failpoint
from trainsync.weights.buckets.layout import TensorMeta
from trainsync.weights.errors import SchemaMismatchError, WeightsError
from trainsync.weights.staging.checkpoint import TIED_HEAD, checkpoint_tensors, misfit
from trainsync.weights.staging.draft import DRAFT_PREFIX
from trainsync.weights.staging.index import StagedReference
from trainsync.weights.staging.reading import StagedReader

SGLangPauseMode = Literal["keep", "abort"]
"""As `trainsync.engines.servers.base.PauseMode`; SGLang cannot wait for requests while it holds
others back."""

_PAUSES: Final[Mapping[SGLangPauseMode, str]] = {"keep": "retract", "abort": "abort"}
# SGLang 0.5.23 names the last token of a vocabulary so, and gives that token's log-probability.
_UNNAMED: Final = 0
_PROMPTS: Final = 16  # of one request for log-probabilities


@dataclass(frozen=True)
class _Model:
    """The path that the server was started from.

    Attributes:
        dtype: of the server; "auto" or a name of torch's.
        tied: whether the head is the embedding.
    """

    tensors: Sequence[TensorMeta]
    dtype: str
    tied: bool


class SGLangServer:
    """See `ServerDriver`.

    Requests that run keep their tokens, and what the older weights computed for them is computed
    anew: no token after the update comes from a cache of older weights.

    Args:
        url: such as ``http://127.0.0.1:30000``.
        pause: see `SGLangPauseMode`.
        timeout: seconds for an update from its first call to its last but one, and for every other
            call.
        resume_timeout: seconds for the last call of an update.
        memory: the memory file system in which versions are staged, and which the server sees at
            the same path; None: as the environment says.
        route: by which a version comes to the server.
        bucket_bytes: of weights that are sent at once, by another route than disk.
        transport: of httpx; for tests.

    Raises:
        ValueError: SGLang has no such pause, or no such route.
    """

    def __init__(
        self,
        url: str,
        *,
        pause: SGLangPauseMode = "keep",
        timeout: float = 600.0,
        resume_timeout: float = 30.0,
        memory: Path | None = None,
        route: SGLangRoute = "disk",
        bucket_bytes: int = BUCKET_BYTES,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        if pause not in _PAUSES:
            raise ValueError(f"SGLang cannot pause by {pause!r}: {', '.join(_PAUSES)}")
        self._pause = _PAUSES[pause]
        self._timeout = timeout
        self._resume_timeout = resume_timeout
        self._reader = StagedReader(memory)
        self._calls = ServerCalls(url, transport)
        self._route = route_of(
            route, self._calls, self._reader.memory, bucket_bytes=bucket_bytes, timeout=timeout
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
        self._route.close()
        self._calls.close()

    def tag(self) -> str:
        """See `ServerDriver`."""
        said = self._calls.ask("GET", "/model_info", self._deadline()).get("weight_version")
        if not isinstance(said, str):
            raise ServerError(f"{self._calls.name} names no weight version")
        return said

    def version(self) -> int | None:
        """See `ServerDriver`."""
        return version_in(self.tag())

    def is_paused(self) -> bool:
        """See `ServerDriver`."""
        if self._is_on("/ready"):
            return False
        if self._is_on("/ping"):  # as `/ready`, but for the pause
            return True
        raise ServerError(f"{self._calls.name} starts, ends or is unhealthy")

    def is_alive(self) -> bool:
        """See `ServerDriver`. ``/health`` generates, which a paused server does not."""
        return self._is_on("/ping")

    def _is_on(self, path: str) -> bool:
        status = self._calls.status("GET", path, self._deadline())
        if status not in (HTTPStatus.OK, HTTPStatus.SERVICE_UNAVAILABLE):
            raise ServerError(f"{self._calls.name}{path} answered {status}, not 200 or 503")
        return status == HTTPStatus.OK

    def checksums(self) -> Mapping[str, str]:
        """A digest of each of its tensors, as they are in memory, by rank and name.

        The digests are SGLang's own, so they only tell of changes.

        Raises:
            ServerError: no such answer.
        """
        answer = self._calls.ask(
            "POST", "/weights_checker", self._deadline(), {"action": "checksum"}
        )
        try:
            return {
                f"{_rank_name(rank)}:{name}": str(digest)
                for rank in answer["ranks"]
                for name, digest in rank["checksums"].items()
            }
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise ServerError(f"{self._calls.name} gave no checksums: {error!r}") from error

    def logprobs(self, prompts: Sequence[Sequence[int]]) -> tuple[tuple[float, ...], ...]:
        """See `ServerDriver`. Several requests, which generate one token for each prompt."""
        deadline = self._deadline()
        found: list[tuple[float, ...]] = []
        for begin in range(0, len(prompts), _PROMPTS):
            asked = [list(prompt) for prompt in prompts[begin : begin + _PROMPTS]]
            body = {
                "input_ids": asked,
                "sampling_params": {"max_new_tokens": 1, "temperature": 0},
                "return_logprob": True,
                "logprob_start_len": 0,
            }
            answers = self._calls.ask_any("POST", "/generate", deadline, body)
            try:
                found += [
                    input_logprobs(prompt, answer)
                    for prompt, answer in zip(asked, answers, strict=True)
                ]
            except (KeyError, TypeError, ValueError) as error:
                raise ServerError(
                    f"{self._calls.name} gave no log-probabilities of the prompts: {error!r}"
                ) from error
        return tuple(found)

    def update(self, version: int, staged: StagedReference, tag: str | None = None) -> Update:
        """See `ServerDriver`. While it goes on by disk, the version is in memory twice."""
        deadline = self._deadline()
        started = time.monotonic()
        was_paused = False
        try:
            was_paused = self.is_paused()
            laid = self._lay(staged, deadline)
        except (WeightsError, MergeError, OSError, ValueError) as error:
            kind = ServerPausedError if was_paused else UpdateRefusedError
            raise kind(f"version {version}: {error}") from error
        try:
            paused = time.monotonic()
            failpoint("server.pausing")
            self._replace_and_resume(
                version, str(version) if tag is None else tag, laid, deadline, was_paused
            )
        finally:
            laid.close()
        return Update(version, paused - started, time.monotonic() - paused)

    def _model(self, info: Mapping[str, Any]) -> _Model:
        """The names that the server takes.

        Args:
            info: its ``/server_info``.

        Raises:
            ServerError: it does not say that.
            SchemaMismatchError: the server was not started from files of this host.
            OSError, ValueError: those files cannot be read.
        """
        path, dtype = info.get("model_path"), info.get("dtype")
        if not isinstance(path, str) or not isinstance(dtype, str):
            raise ServerError(f"{self._calls.name}/server_info names no model_path and dtype")
        folder = Path(path)
        tensors = checkpoint_tensors(folder) if folder.is_absolute() and folder.is_dir() else None
        if tensors is None:
            raise SchemaMismatchError(
                f"the server was started from {path!r}: start it from the absolute path of a "
                "folder of this host, with safetensors files"
            )
        config = json.loads((folder / "config.json").read_bytes())
        text = config.get("text_config") or config
        without_head = all(meta.name != TIED_HEAD for meta in tensors)
        return _Model(tensors, dtype, without_head or bool(text.get("tie_word_embeddings")))

    def _lay(self, reference: StagedReference, deadline: float) -> LaidVersion:
        """The version, ready to be loaded.

        The server's answer passes through SGLang's scheduler, behind an update that another driver
        began and gave up. Raises as `_model` does, and `Route.lay`.
        """
        if reference.draft:
            raise SchemaMismatchError(
                f"tensors {DRAFT_PREFIX}* are of a draft model, which SGLang does not take"
            )
        info = self._calls.ask("GET", "/server_info", deadline)
        model = self._model(info)
        staged = self._reader.open(reference)
        wrong = misfit(model.tensors, staged.index.schema.tensors, model.dtype, tied=model.tied)
        if wrong is not None:
            raise SchemaMismatchError(wrong)
        tensors = {
            name: tensor
            for name, tensor in staged.tensors.items()
            if not (model.tied and name == TIED_HEAD)
        }
        return self._route.lay(staged.index, tensors, info, deadline)

    def _replace_and_resume(
        self, version: int, tag: str, laid: LaidVersion, deadline: float, was_paused: bool
    ) -> None:
        try:
            self._replace(tag, laid, deadline)
        except ServerError as error:
            # A server that was paused before may hold anything: the update that paused it failed.
            if KEPT not in str(error) or was_paused:
                raise ServerPausedError(
                    f"version {version}: {error}; {self._calls.name} is left paused, or ends"
                ) from error
            self._resume(version, error)
            raise UpdateRefusedError(f"version {version}: {error}") from error
        self._resume(version, None)

    def _replace(self, tag: str, laid: LaidVersion, deadline: float) -> None:
        """From the call to pause to the last one before resume."""
        try:
            self._calls.ask("POST", "/pause_generation", deadline, {"mode": self._pause})
        except ServerError as error:
            raise ServerError(f"{KEPT}: {error}") from error
        failpoint("server.paused")
        laid.load(tag, deadline)
        failpoint("server.loaded")
        if (now := self.tag()) != tag:
            raise ServerError(f"{self._calls.name} says that it has version {now}, not {tag}")
        failpoint("server.named")

    def _resume(self, version: int, cause: ServerError | None) -> None:
        failpoint("server.resuming")
        try:
            deadline = time.monotonic() + self._resume_timeout
            self._calls.ask("POST", "/continue_generation", deadline, {})
        except ServerError as error:
            before = "" if cause is None else f"{cause}; then "
            raise ServerPausedError(
                f"version {version}: {before}{self._calls.name} did not resume: {error}"
            ) from error

    def _deadline(self) -> float:
        return time.monotonic() + self._timeout


def input_logprobs(prompt: Sequence[int], answer: Mapping[str, Any]) -> tuple[float, ...]:
    """The log-probabilities of a prompt's tokens, from the second on, in a ``/generate`` answer.

    Raises:
        KeyError, TypeError, ValueError: it does not say that.
    """
    rows = answer["meta_info"]["input_token_logprobs"]
    pairs = zip(prompt, (row[1] for row in rows), strict=True)
    if any(named not in (token, _UNNAMED) for token, named in pairs):
        raise ValueError("its tokens are not those of the prompt")
    return tuple(float(row[0]) for row in rows[1:])


def _rank_name(rank: Mapping[str, Any]) -> str:
    """``target:dp0:pp0:tp0`` of a rank's checksums."""
    found = rank["parallelism_info"]
    info = found[0] if isinstance(found, list) else found
    return f"{info['role']}:dp{info['dp_rank']}:pp{info['pp_rank']}:tp{info['tp_rank']}"
