"""Drives a ``vllm serve --enable-lora`` whose base model stays, and whose adapter follows a run.

Each version is read from the same path, a link that is moved while the server is paused: vLLM 0.32
reads an adapter that was loaded in place anew in every step, from the path that the request began
with, so that a request which runs would bring the version before back.
"""

import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

import httpx

from trainsync.checkpoint.errors import MergeError
from trainsync.engines.servers.adapter import CHECK_ADAPTER, FORGET_ADAPTERS, Adapter
from trainsync.engines.servers.base import PauseMode, Update
from trainsync.engines.servers.errors import ServerError
from trainsync.engines.servers.vllm import VLLMServer
from trainsync.weights.errors import WeightsError
from trainsync.weights.staging.index import StagedReference
from trainsync.weights.staging.reading import StagedReader

_LOAD: Final = "/v1/load_lora_adapter"
_UNLOAD: Final = "/v1/unload_lora_adapter"
_LINK: Final = "current"


class VLLMAdapterServer(VLLMServer):
    """See `VLLMServer`; versions are those of an adapter, and `logprobs` asks the adapter.

    Args:
        adapter: the name for requests, and PEFT's configuration.
        memory: the memory file system in which versions are staged, and which the server sees at
            the same path. The folder of the adapter stays there when the driver ends.
    """

    def __init__(
        self,
        url: str,
        adapter: Adapter,
        memory: Path,
        *,
        pause: PauseMode = "keep",
        timeout: float = 600.0,
        resume_timeout: float = 30.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        super().__init__(
            url, pause=pause, timeout=timeout, resume_timeout=resume_timeout, transport=transport
        )
        self._adapter = adapter
        self._reader = StagedReader(memory)
        name = hashlib.sha256(f"{url} {adapter.name}".encode()).hexdigest()[:16]
        self._home = memory / f"trainsync-adapter-{name}"
        self._laid: Path | None = None

    def update(self, version: int, staged: StagedReference, tag: str | None = None) -> Update:
        """See `ServerDriver`."""
        try:
            return super().update(version, staged, tag)
        finally:
            self._sweep()

    def _asked(self) -> dict[str, Any]:
        return {"model": self._adapter.name}

    def _look(self, staged: StagedReference, deadline: float) -> None:
        """Lay the version, and let each worker load it, which serves on."""
        if self._calls.status("GET", _LOAD, deadline) == HTTPStatus.NOT_FOUND:
            raise ServerError(
                f"{self._calls.name} takes no adapters: start it with --enable-lora and "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
            )
        try:
            opened = self._reader.open(staged)
            opened.check()
            self._home.mkdir(mode=0o700, exist_ok=True)
            if not self._is_ours():
                raise ServerError(f"{self._home} belongs to another user")
            self._laid = Path(
                tempfile.mkdtemp(prefix=f"{opened.index.weight_version}-", dir=self._home)
            )
            self._adapter.lay(self._laid, opened.tensors)
        except ServerError:
            raise
        except (WeightsError, MergeError, OSError) as error:
            raise ServerError(str(error)) from error
        self._workers_all(CHECK_ADAPTER, deadline, folder=str(self._laid))

    def _load(self, staged: StagedReference, deadline: float) -> None:
        del staged  # laid by now
        assert self._laid is not None, "the version was looked at"
        link = self._home / _LINK
        new = self._laid.with_name(f"{self._laid.name}.{_LINK}")
        try:
            new.symlink_to(self._laid.name)
            new.replace(link)
        except OSError as error:
            raise ServerError(f"{link} cannot be moved: {error.strerror}") from error
        self._workers_all(FORGET_ADAPTERS, deadline)
        known = self._known(deadline)
        if known == str(link):
            return
        if known is not None:  # the server was started with it, from another folder
            self._say(_UNLOAD, {"lora_name": self._adapter.name}, deadline)
        body = {"lora_name": self._adapter.name, "lora_path": str(link)}
        self._say(_LOAD, body, deadline)

    def _name(self, tag: str, deadline: float) -> None:
        self._calls.ask("POST", "/update_weight_version", deadline, {"new_version": tag})

    def _known(self, deadline: float) -> str | None:
        """The path from which the server has the adapter; None: it has none of this name."""
        answer = self._calls.ask("GET", "/v1/models", deadline)
        try:
            found = [row["root"] for row in answer["data"] if row["id"] == self._adapter.name]
        except (KeyError, TypeError) as error:
            raise ServerError(f"{self._calls.name} does not say its models: {error!r}") from error
        return str(found[0]) if found else None

    def _say(self, path: str, body: Mapping[str, Any], deadline: float) -> None:
        """A call whose answer is no JSON. Raises `ServerError`."""
        status, said = self._calls.raw("POST", path, deadline, body)
        if not httpx.codes.is_success(status):
            raise ServerError(f"{self._calls.name}{path} answered {status}: {said[:1000]!r}")

    def _workers_all(self, method: str, deadline: float, **arguments: str) -> None:
        """A call of all workers, each of which answers True. Raises `ServerError`."""
        body = {"method": method, "kwargs": arguments}
        answer = self._calls.ask("POST", "/collective_rpc", deadline, body)
        results = answer.get("results")
        # vLLM passes on objects and lists as they are, and everything else as text.
        if not isinstance(results, list) or not results or set(map(str, results)) != {"True"}:
            raise ServerError(f"{self._calls.name} did not do {method}: {results!r}")

    def _is_ours(self) -> bool:
        """Whether the home is a folder of this user, for others may write to the memory, too."""
        try:
            home = self._home.lstat()
        except OSError:
            return False
        return stat.S_ISDIR(home.st_mode) and home.st_uid == os.getuid()

    def _sweep(self) -> None:
        """Remove the versions that no request can be served from."""
        self._laid = None
        if not self._is_ours():
            return
        try:
            current = (self._home / _LINK).readlink().name
        except OSError:
            current = None
        for path in self._home.glob("*"):
            if path.name not in (current, _LINK):
                if path.is_symlink():
                    path.unlink(missing_ok=True)
                else:
                    shutil.rmtree(path, ignore_errors=True)
