"""Drives a ``vllm serve --enable-lora`` whose base model stays, and whose adapter follows a run.

Each version is read from the same path, a link that is moved while the server is paused: vLLM 0.32
reads an adapter that was loaded in place anew in every step, from the path that the request began
with, so that a request which runs would bring the version before back.
"""

import os
import shutil
import stat
import tempfile
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final

import httpx

from trainsync.api.protocol import ASLEEP
from trainsync.checkpoint.errors import MergeError
from trainsync.engines.servers.adapter import CHECK_ADAPTER, CONFIG, FORGET_ADAPTERS, Adapter
from trainsync.engines.servers.base import PauseMode, Update
from trainsync.engines.servers.errors import KEPT, ServerError
from trainsync.engines.servers.place import place_of
from trainsync.engines.servers.tags import DISCARDED, version_in
from trainsync.engines.servers.vllm import VLLMServer
from trainsync.weights.errors import WeightsError
from trainsync.weights.staging.index import StagedReference
from trainsync.weights.staging.reading import StagedReader

_LOAD: Final = "/v1/load_lora_adapter"


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
        self._home = memory / f"trainsync-adapter-{place_of(url, adapter.name)}"
        self._link = self._home / "current"
        self._laid: Path | None = None

    def tag(self) -> str:
        """See `ServerDriver`; no tag of a version where the server lacks the adapter, or reads it
        with another configuration: an agent before may have brought another one."""
        said = super().tag()
        if version_in(said) is None or self._serves():
            return said
        return f"{said}, without our adapter {self._adapter.name}"

    def _serves(self) -> bool:
        if self._found(self._deadline())[0] != str(self._link):
            return False
        try:
            return (self._link / CONFIG).read_text() == self._adapter.file()
        except OSError:
            return False

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
        self._check_base()
        if self._calls.status("GET", _LOAD, deadline) == HTTPStatus.NOT_FOUND:
            raise ServerError(
                f"{self._calls.name} takes no adapters: start it with --enable-lora and "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
            )
        self._has_adapter(deadline)
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
            _link_to(self._laid).symlink_to(self._laid.name)
        except ServerError:
            raise
        except (WeightsError, MergeError, OSError) as error:
            raise ServerError(str(error)) from error
        self._workers_all(CHECK_ADAPTER, deadline, folder=str(self._laid))

    def _load(self, staged: StagedReference, deadline: float) -> None:
        del staged  # laid by now
        assert self._laid is not None, "the version was looked at"
        self._check_base()
        try:
            _link_to(self._laid).replace(self._link)
        except OSError as error:
            raise ServerError(f"{KEPT}: {self._link} cannot be moved: {error.strerror}") from error
        self._workers_all(FORGET_ADAPTERS, deadline)
        if self._has_adapter(deadline):
            return
        body = {"lora_name": self._adapter.name, "lora_path": str(self._link)}
        status, said = self._calls.raw("POST", _LOAD, deadline, body)  # no JSON
        if not httpx.codes.is_success(status):
            raise ServerError(f"{self._calls.name}{_LOAD} answered {status}: {said[:1000]!r}")

    def _name(self, tag: str, deadline: float) -> None:
        self._check_base()
        self._calls.ask("POST", "/update_weight_version", deadline, {"new_version": tag})

    def _check_base(self) -> None:
        """Raise `ServerError` unless the server has its base model."""
        said = super().tag()
        if said == ASLEEP:
            raise ServerError(f"{self._calls.name} sleeps")
        if said == DISCARDED:
            raise ServerError(
                f"{self._calls.name} slept at level 2, which discards the base model: "
                "start it anew, and let it sleep at level 1"
            )

    def _has_adapter(self, deadline: float) -> bool:
        """Whether the server has the adapter, from our path.

        Raises:
            ServerError: from another one. The name is not taken over: vLLM 0.32 would answer
                requests that run, or wait, from there, and ends where one of them meets one of ours
                in a step, because to vLLM both are the same adapter.
        """
        root, is_base = self._found(deadline)
        if is_base:
            raise ServerError(
                f"{KEPT}: the base model of {self._calls.name} is called {self._adapter.name}: "
                "give the adapter another name"
            )
        if root not in (None, str(self._link)):
            raise ServerError(
                f"{KEPT}: {self._calls.name} has {self._adapter.name} from {root}: start it "
                "without this adapter"
            )
        return root is not None

    def _found(self, deadline: float) -> tuple[str | None, bool]:
        """The folder of the model that the server has under the adapter's name, None: of none;
        and whether it is its base model."""
        answer = self._calls.ask("GET", "/v1/models", deadline)
        try:
            for row in answer["data"]:
                if row["id"] == self._adapter.name:
                    return str(row["root"]), row["parent"] is None
        except (KeyError, TypeError) as error:
            raise ServerError(f"{self._calls.name} does not say its models: {error!r}") from error
        return None, False

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
            current = self._link.readlink().name
        except OSError:
            current = None
        for path in self._home.glob("*"):
            if path.name not in (current, self._link.name):
                if path.is_symlink():
                    path.unlink(missing_ok=True)
                else:
                    shutil.rmtree(path, ignore_errors=True)


def _link_to(folder: Path) -> Path:
    """The link that is to replace the one that the server reads."""
    return folder.with_name(f"{folder.name}.link")
