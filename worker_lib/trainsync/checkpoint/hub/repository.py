"""A Hugging Face repository that takes a model: all files of it in one commit, or none.

huggingface_hub does the requests, with its own retries for uploads; what it asks once is asked a
few times here, and every wait for an answer has a deadline.
"""

import logging
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Final, TypeVar

import httpx
from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    ModelInfo,
    get_token,
    set_client_factory,
)
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.utils import logging as hub_logging
from huggingface_hub.utils._http import default_client_factory
from huggingface_hub.utils._validators import validate_repo_id
from huggingface_hub.utils.tqdm import (
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
)

from trainsync.checkpoint.hub.errors import PushError
from trainsync.checkpoint.hub.failures import may_pass, translate
from trainsync.checkpoint.hub.model_files import ModelFile, model_files

WAITS: Final = (1.0, 5.0)
"""Seconds before each further try."""
_DEADLINES: Final = httpx.Timeout(connect=15.0, read=300.0, write=300.0, pool=60.0)
_OLD_WEIGHTS: Final = re.compile(
    r"(?:model|pytorch_model)(?:-\d+-of-\d+)?\.(?:safetensors|bin)(?:\.index\.json)?"
)
_FILES_AT_ONCE: Final = 4
_MAIN: Final = "main"

T = TypeVar("T")


class Visibility(StrEnum):
    """Of a repository that is made."""

    PRIVATE = "private"
    PUBLIC = "public"


@dataclass(frozen=True)
class Pushed:
    """A commit of the hub that holds the model.

    Attributes:
        commit: its hash; ``url`` is its page.
        removed: old weights that went with it.
    """

    repo: str
    revision: str
    commit: str
    url: str
    files: int
    bytes: int
    removed: tuple[str, ...]


class Repository:
    """A model repository of the hub, or of HF_ENDPOINT. The token is that of HF_TOKEN or a login.

    Args:
        repo: ``namespace/name``.
        revision: the branch, which must be there.
        create: how to make the repository where there is none; None refuses that. One that is
            there must be private if that is asked for.
        endpoint: of the hub; HF_ENDPOINT's when absent.

    Raises:
        PushError: the name is wrong, or there is no token.
    """

    def __init__(
        self,
        repo: str,
        *,
        revision: str = _MAIN,
        create: Visibility | None = None,
        endpoint: str | None = None,
    ) -> None:
        if not _is_name(repo):
            raise PushError(f"{repo!r} names no repository; expected NAMESPACE/NAME")
        if not get_token():
            raise PushError(f"{repo}: no token; set HF_TOKEN, or log in with `hf auth login`")
        self.repo = repo
        self.revision = revision
        self._create = create
        self._api = HfApi(endpoint=endpoint)

    def check(self) -> None:
        """See that a push may begin; nothing is changed.

        Raises:
            PushError: there is no such repository or branch, or the token is refused.
        """
        with self._guarded():
            self._find()

    def push(self, folder: Path, message: str, *, bars: bool = False) -> Pushed:
        """Commit the model in ``folder``, in the place of one that is there.

        Old weights that the new ones do not replace are removed by the same commit; other files
        stay. What the hub says that it has is compared with what was sent.

        Args:
            message: of the commit.
            bars: whether to show huggingface_hub's own progress bars, on stderr.

        Raises:
            ModelFilesError: the model is not whole; nothing was sent.
            PushError: the hub refuses or cannot be reached; nothing was committed, unless the
                message says so.
            OSError: a file cannot be read.
        """
        files = model_files(folder)
        with self._guarded(bars=bars):
            if self._find() is None:
                self._make()
            oid, url, removed = _tried(lambda: self._commit(folder, files, message))
            self._compare(files, oid)
        size = sum(file.bytes for file in files)
        return Pushed(self.repo, self.revision, oid, url, len(files), size, removed)

    def _find(self) -> ModelInfo | None:
        """The repository; None where it is to be made."""
        try:
            found = _tried(lambda: self._api.model_info(self.repo))
        except HfHubHTTPError as error:
            if error.response.status_code != 404 or self._create is None:
                raise
            if self.revision != _MAIN:
                raise PushError(
                    f"{self.repo}: there is no such repository, and a new one has no branch "
                    f"{self.revision}"
                ) from None
            return None
        if self._create is Visibility.PRIVATE and found.private is False:
            raise PushError(f"{self.repo} is there already, and public; expected a private one")
        _tried(lambda: self._api.model_info(self.repo, revision=self.revision))
        return found

    def _make(self) -> None:
        private = self._create is Visibility.PRIVATE
        _tried(lambda: self._api.create_repo(self.repo, private=private, exist_ok=True))

    def _commit(
        self, folder: Path, files: Sequence[ModelFile], message: str
    ) -> tuple[str, str, tuple[str, ...]]:
        """One try, from the branch as it is now: a commit whose reply was lost is then found."""
        head = self._api.model_info(self.repo, revision=self.revision)
        new = {file.path for file in files}
        old = [sibling.rfilename for sibling in head.siblings or []]
        removed = tuple(name for name in old if _OLD_WEIGHTS.fullmatch(name) and name not in new)
        adding = [
            CommitOperationAdd(path_in_repo=file.path, path_or_fileobj=folder / file.path)
            for file in files
        ]
        deleting = [CommitOperationDelete(path_in_repo=name) for name in removed]
        done = self._api.create_commit(
            self.repo,
            [*adding, *deleting],
            commit_message=message,
            revision=self.revision,
            parent_commit=head.sha,
            num_threads=_FILES_AT_ONCE,
        )
        return done.oid, done.commit_url, removed

    def _compare(self, files: Sequence[ModelFile], commit: str) -> None:
        there = _tried(
            lambda: self._api.model_info(self.repo, revision=commit, files_metadata=True)
        )
        sizes = {sibling.rfilename: sibling.size for sibling in there.siblings or []}
        for file in files:
            if sizes.get(file.path) != file.bytes:
                has = sizes.get(file.path)
                raise PushError(
                    f"{self.repo}: commit {commit} was made, but {file.path} "
                    + ("is not in it" if has is None else f"has {has} bytes there")
                    + f"; expected {file.bytes} bytes. See to the repository's .gitignore"
                )

    @contextmanager
    def _guarded(self, *, bars: bool = False) -> Iterator[None]:
        """Deadlines, quiet, and one sentence for what is raised."""
        verbosity, had_bars = hub_logging.get_verbosity(), not are_progress_bars_disabled()
        set_client_factory(_client)
        hub_logging.set_verbosity(logging.ERROR)  # its warnings quote signed URLs
        if not bars:
            disable_progress_bars()
        try:
            yield
        except PushError:
            raise
        except Exception as error:
            if type(error) in (FileNotFoundError, PermissionError):
                raise
            raise translate(error, self.repo, self.revision) from None
        finally:
            set_client_factory(default_client_factory)
            hub_logging.set_verbosity(verbosity)
            if not bars and had_bars:
                enable_progress_bars()


def _is_name(repo: str) -> bool:
    try:
        validate_repo_id(repo)
    except HFValidationError:
        return False
    return repo.count("/") == 1


def _client() -> httpx.Client:
    client = default_client_factory()
    client.event_hooks["request"].append(_set_deadline)
    return client


def _set_deadline(request: httpx.Request) -> None:
    # Not as the client's own: some calls of huggingface_hub say that they want none.
    request.extensions = {**request.extensions, "timeout": _DEADLINES.as_dict()}


def _tried(call: Callable[[], T]) -> T:
    """``call``, a few times more where that may help."""
    for wait in WAITS:
        try:
            return call()
        except Exception as error:
            if not may_pass(error):
                raise
        time.sleep(wait)
    return call()
