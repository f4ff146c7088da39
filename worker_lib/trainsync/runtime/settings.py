"""The run, as the environment describes it (`trainsync.api.env`); pure.

Without ``TRAINSYNC_MONITOR_URL`` the run is local: a directory or a store, and a monitor in the
process that claims the attempt.
"""

import difflib
import hashlib
import logging
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from trainsync.api import env
from trainsync.api.quantities import whole_bytes
from trainsync.api.spec import (
    SAVE_DEADLINE_SECONDS,
    Checkpoint,
    SaveStrategy,
    Sync,
    SyncMethod,
    SyncStyle,
    Verify,
)
from trainsync.checkpoint.memory.place import DEFAULT_MEMORY, MemoryPlace
from trainsync.runtime.errors import SettingsError
from trainsync.runtime.servers import InferenceServers, read_servers, write_servers
from trainsync.runtime.sync_store import SyncStore, read_sync_store
from trainsync.storage.objects.address import is_url, parse
from trainsync.storage.objects.errors import StoreUrlError
from trainsync.storage.saves.claims import LOCAL_UID
from trainsync.weights.pacing.policy import SyncPolicy

DEFAULT_LOCAL_DIRECTORY = "trainsync-run"
LOCAL_CLUSTER = "local"

_LOG = logging.getLogger(__name__)
_PREFIX = "TRAINSYNC_"

DEFAULT_BUCKET_SIZE = 16 << 20
_BUCKET_SIZES = range(1 << 20, (16 << 30) + 1)  # as the API server checks
_BUCKET_UNIT = 64  # tensors begin at multiples of it

ChoiceT = TypeVar("ChoiceT", bound=StrEnum)

# Only the operator sets these; without a monitor's address they mean a broken environment.
_CLUSTER_ONLY = (env.RUN_NAMESPACE, env.RUN_UID, env.CLUSTER, env.TOKEN_FILE)


@dataclass(frozen=True)
class CheckpointSettings:
    """``spec.checkpoint``: ``interval`` in training steps; ``max_to_keep`` None keeps all;
    ``save_timeout`` in seconds, after which an incomplete save is aborted; ``memory`` in bytes,
    kept in ``memory_directory``, None keeps nothing there; ``memory_copies`` with a neighbour;
    ``incremental``: states that have not changed are not written again."""

    interval: int
    max_to_keep: int | None
    save_strategy: SaveStrategy
    verify: Verify
    save_timeout: int = SAVE_DEADLINE_SECONDS
    memory: int | None = None
    memory_directory: Path = DEFAULT_MEMORY
    memory_copies: int = 0
    incremental: bool = False


@dataclass(frozen=True)
class SyncSettings:
    """``spec.sync``: ``interval`` in training steps, ``timeout`` in seconds, sizes in bytes."""

    method: SyncMethod
    interval: int
    timeout: float
    style: SyncStyle = SyncStyle.FIXED
    offset: int = 0
    max_staleness: int | None = None
    bucket_size: int = DEFAULT_BUCKET_SIZE
    delta: bool = False
    store: SyncStore | None = None

    def policy(self, batches_per_step: int = 1) -> SyncPolicy:
        """The style and its numbers, as a value that decides.

        Args:
            batches_per_step: how many explorers' batches one training step uses up; only
                ``fully_async`` has to know.

        Raises:
            ValueError: the numbers do not fit together.
        """
        bounded = self.style is SyncStyle.FULLY_ASYNC
        return SyncPolicy(
            self.style,
            interval=self.interval,
            offset=self.offset,
            max_staleness=self.max_staleness,
            batches_per_step=batches_per_step if bounded else 1,
            timeout=self.timeout,
        )


@dataclass(frozen=True)
class RunSettings:
    """A run; ``monitor_url`` None means local. Attempt and incarnation are known after a claim.

    ``trainer_cluster`` is None where explorers are in the trainers' cluster.
    """

    run: str
    namespace: str | None
    uid: str
    cluster: str
    attempt: int | None
    incarnation: str | None
    directory: Path
    """Of a run in a store: where processes of this machine keep each other off."""
    monitor_url: str | None
    token_file: Path | None
    checkpoint: CheckpointSettings
    sync: SyncSettings
    trainer_cluster: str | None = None
    servers: tuple[InferenceServers, ...] = ()
    store: str | None = None
    """URL of the store that checkpoints are in; None: they are in ``directory``."""
    warm_spare: bool = False
    pod_replacement_seconds: int = 0

    @property
    def is_apart(self) -> bool:
        """Whether the trainers are in another Ray cluster."""
        return self.trainer_cluster not in (None, self.cluster)

    @property
    def ray_namespace(self) -> str:
        """See `RunContext.ray_namespace`."""
        return f"trainsync-{self.run}-{self.attempt}"

    @property
    def memory_place(self) -> MemoryPlace | None:
        """Where shards are kept in memory; None when they are not."""
        memory, budget = self.checkpoint.memory_directory, self.checkpoint.memory
        if budget is None:
            return None
        copies = self.checkpoint.memory_copies
        where = self.store or self.directory
        return MemoryPlace.of_run(memory, budget, self.uid, where, copies)

    @property
    def is_local(self) -> bool:
        """Whether the monitor lives in the process that claimed the attempt."""
        return self.monitor_url is None

    def environment(self) -> dict[str, str]:
        """The variables that make `read_settings` give these settings in another process."""
        values = {
            env.RUN_NAME: self.run,
            env.ATTEMPT: self.attempt,
            env.INCARNATION: self.incarnation,
            env.CHECKPOINT_DIR: self.store or self.directory,
            env.CHECKPOINT_INTERVAL: self.checkpoint.interval,
            env.CHECKPOINT_MAX_TO_KEEP: self.checkpoint.max_to_keep,
            env.CHECKPOINT_SAVE_STRATEGY: self.checkpoint.save_strategy.value,
            env.CHECKPOINT_VERIFY: self.checkpoint.verify.value,
            env.CHECKPOINT_SAVE_TIMEOUT: self.checkpoint.save_timeout,
            env.CHECKPOINT_INCREMENTAL: "true" if self.checkpoint.incremental else None,
            env.CHECKPOINT_MEMORY: self.checkpoint.memory,
            env.SYNC_METHOD: self.sync.method.value,
            env.SYNC_INTERVAL: self.sync.interval,
            env.SYNC_TIMEOUT_SECONDS: f"{self.sync.timeout:g}",
            env.SYNC_BUCKET_SIZE: self.sync.bucket_size,
            env.SYNC_DELTA: "true" if self.sync.delta else None,
            env.SYNC_STYLE: self.sync.style.value,
            env.SYNC_OFFSET: self.sync.offset,
            env.SYNC_MAX_STALENESS: self.sync.max_staleness,
            env.SERVER_URLS: write_servers(self.servers),
            env.WARM_SPARE: "true" if self.warm_spare else None,
            env.POD_REPLACEMENT_SECONDS: self.pod_replacement_seconds or None,
        }
        if self.checkpoint.memory is not None:
            values[env.CHECKPOINT_MEMORY_DIR] = self.checkpoint.memory_directory
            values[env.CHECKPOINT_MEMORY_COPIES] = self.checkpoint.memory_copies
        if self.sync.store is not None:
            values |= self.sync.store.environment()
        if not self.is_local:
            values |= {
                env.RUN_NAMESPACE: self.namespace,
                env.RUN_UID: self.uid,
                env.CLUSTER: self.cluster,
                env.TRAINER_CLUSTER: self.trainer_cluster,
                env.MONITOR_URL: self.monitor_url,
                env.TOKEN_FILE: self.token_file,
            }
        return {name: str(value) for name, value in values.items() if value is not None}


def read_settings(environ: Mapping[str, str], directory: str | Path | None = None) -> RunSettings:
    """The settings that ``environ`` holds.

    Args:
        directory: of a local run that ``TRAINSYNC_CHECKPOINT_DIR`` does not name, or the URL of
            its store; then ``./trainsync-run``.

    Raises:
        SettingsError: a variable is missing, cannot be read, or seems to be misspelt.
    """
    wrong = list(misspelt(environ))
    if env.MONITOR_URL in environ:
        for sentence in wrong:  # a newer operator may set more than is known here
            _LOG.warning("%s", sentence)
        return _cluster(environ)
    if wrong:
        raise SettingsError("; ".join(wrong))
    stray = [name for name in _CLUSTER_ONLY if name in environ]
    if stray:
        raise SettingsError(
            f"{', '.join(stray)} is set, but {env.MONITOR_URL} is not: expected all variables of a "
            "TrainingRun, or none of them for a local run"
        )
    named = environ.get(env.CHECKPOINT_DIR)
    place, store = _place(named or directory or DEFAULT_LOCAL_DIRECTORY)
    attempt = _number(environ, env.ATTEMPT, least=0)
    incarnation = environ.get(env.INCARNATION)
    if (attempt is None) != (incarnation is None):
        raise SettingsError(
            f"{env.ATTEMPT} and {env.INCARNATION} come together in a local run, as "
            "RunContext.env() gives them"
        )
    checkpoint, sync = _checkpoint(environ), _sync(environ)
    return RunSettings(
        run=environ.get(env.RUN_NAME)
        or (store or str(place.absolute())).rstrip("/").rpartition("/")[2],
        namespace=None,
        uid=LOCAL_UID,
        cluster=LOCAL_CLUSTER,
        attempt=attempt,
        incarnation=incarnation,
        directory=place.absolute(),
        monitor_url=None,
        token_file=None,
        checkpoint=checkpoint,
        sync=sync,
        servers=read_servers(environ),
        store=store,
        warm_spare=_flag(environ, env.WARM_SPARE),
        pod_replacement_seconds=_number(environ, env.POD_REPLACEMENT_SECONDS, least=0) or 0,
    )


def _place(where: str | Path) -> tuple[Path, str | None]:
    """A run's directory, and the URL of its store if ``where`` is one. Raises `SettingsError`."""
    if not is_url(text := str(where)):
        return Path(where), None
    try:
        url = str(parse(text))
    except StoreUrlError as error:
        raise SettingsError(str(error)) from error
    key = hashlib.sha256(url.encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"trainsync-{os.geteuid()}" / f"run-{key}", url


def misspelt(environ: Mapping[str, str]) -> Iterator[str]:
    """A sentence for each variable that is not known, and like one that is."""
    known = {value for value in vars(env).values() if isinstance(value, str)}
    names = {name.removeprefix(_PREFIX): name for name in known if name.startswith(_PREFIX)}
    for name in sorted(environ):
        if not name.startswith(_PREFIX) or name in known:
            continue
        word = name.removeprefix(_PREFIX)
        like = difflib.get_close_matches(word, names, n=1, cutoff=0.8)
        like = like or sorted(
            other for other in names if f"_{other}_".find(f"_{word}_") >= 0 and word
        )
        if like:
            meant = " or ".join(names[other] for other in like)
            yield f"{name} is set, which is not read: {meant} was meant?"


def _cluster(environ: Mapping[str, str]) -> RunSettings:
    token = environ.get(env.TOKEN_FILE)
    attempt = _number(environ, env.ATTEMPT, least=0)
    if attempt is None:
        raise SettingsError(f"{env.ATTEMPT} is not set; the operator sets it in every pod and job")
    place, store = _place(_required(environ, env.CHECKPOINT_DIR))
    checkpoint, sync = _checkpoint(environ), _sync(environ)
    return RunSettings(
        run=_required(environ, env.RUN_NAME),
        namespace=_required(environ, env.RUN_NAMESPACE),
        uid=_required(environ, env.RUN_UID),
        cluster=_required(environ, env.CLUSTER),
        attempt=attempt,
        incarnation=environ.get(env.INCARNATION),
        directory=place,
        monitor_url=_required(environ, env.MONITOR_URL),
        token_file=Path(token) if token else None,
        checkpoint=checkpoint,
        sync=sync,
        trainer_cluster=environ.get(env.TRAINER_CLUSTER),
        servers=read_servers(environ),
        store=store,
        warm_spare=_flag(environ, env.WARM_SPARE),
        pod_replacement_seconds=_number(environ, env.POD_REPLACEMENT_SECONDS, least=0) or 0,
    )


def _checkpoint(environ: Mapping[str, str]) -> CheckpointSettings:
    fields = Checkpoint.model_fields
    interval = _number(environ, env.CHECKPOINT_INTERVAL, least=1)
    return CheckpointSettings(
        interval=fields["interval"].default if interval is None else interval,
        max_to_keep=_number(environ, env.CHECKPOINT_MAX_TO_KEEP, least=1),
        save_strategy=_choice(
            environ, env.CHECKPOINT_SAVE_STRATEGY, SaveStrategy, fields["save_strategy"].default
        ),
        verify=_choice(environ, env.CHECKPOINT_VERIFY, Verify, fields["verify"].default),
        save_timeout=_number(environ, env.CHECKPOINT_SAVE_TIMEOUT, least=1)
        or SAVE_DEADLINE_SECONDS,
        memory=_memory(environ),
        memory_directory=Path(environ.get(env.CHECKPOINT_MEMORY_DIR) or DEFAULT_MEMORY),
        memory_copies=_copies(environ),
        incremental=_flag(environ, env.CHECKPOINT_INCREMENTAL),
    )


def _memory(environ: Mapping[str, str]) -> int | None:
    text = environ.get(env.CHECKPOINT_MEMORY)
    if not text:
        return None
    try:
        budget = whole_bytes(text)
    except ValueError:
        budget = 0
    if budget < 1:
        raise SettingsError(
            f"{env.CHECKPOINT_MEMORY} is {text!r}; expected a quantity of bytes, such as 64Gi"
        )
    return budget


def _copies(environ: Mapping[str, str]) -> int:
    copies = _number(environ, env.CHECKPOINT_MEMORY_COPIES, least=0) or 0
    if copies > 1:
        raise SettingsError(f"{env.CHECKPOINT_MEMORY_COPIES} is '{copies}'; expected 0 or 1")
    if copies and not environ.get(env.CHECKPOINT_MEMORY):
        raise SettingsError(
            f"{env.CHECKPOINT_MEMORY_COPIES} is {copies}, but {env.CHECKPOINT_MEMORY} is not set: "
            "nothing is kept in memory that could be copied"
        )
    return copies


def _sync(environ: Mapping[str, str]) -> SyncSettings:
    defaults = Sync()
    settings = SyncSettings(
        method=_choice(environ, env.SYNC_METHOD, SyncMethod, defaults.method),
        interval=_number(environ, env.SYNC_INTERVAL, least=1) or defaults.interval,
        timeout=float(
            _number(environ, env.SYNC_TIMEOUT_SECONDS, least=1) or defaults.timeout_seconds
        ),
        style=_choice(environ, env.SYNC_STYLE, SyncStyle, defaults.style),
        offset=_number(environ, env.SYNC_OFFSET, least=0) or 0,
        max_staleness=_number(environ, env.SYNC_MAX_STALENESS, least=0),
        bucket_size=_bucket_size(environ),
        delta=_flag(environ, env.SYNC_DELTA),
        store=read_sync_store(environ),
    )
    _check_method(settings)
    try:
        settings.policy()
    except ValueError as error:
        raise SettingsError(
            f"{env.SYNC_STYLE} is {settings.style.value!r}, which does not fit: {error}"
        ) from error
    return settings


def _check_method(sync: SyncSettings) -> None:
    chosen = f"{env.SYNC_METHOD} is {sync.method.value!r}"
    if sync.delta and sync.method is SyncMethod.CHECKPOINT:
        raise SettingsError(
            f"{env.SYNC_DELTA} is set, and {chosen}, whose explorers read whole committed files; "
            "it is for 'memory' and 'nccl'"
        )
    if sync.delta and sync.method is SyncMethod.STORE:
        raise SettingsError(
            f"{env.SYNC_DELTA} is set, and {chosen}, which has deltas of its own: remove it"
        )
    if sync.store is None and sync.method is SyncMethod.STORE:
        raise SettingsError(
            f"{chosen}, and {env.SYNC_STORE_URL} is not set: expected the URL of the store that "
            "versions go through, s3://bucket/prefix"
        )
    if sync.store is not None and sync.method is not SyncMethod.STORE:
        raise SettingsError(
            f"{env.SYNC_STORE_URL} is set, and {chosen}, which uses no store: remove it, or choose "
            "'store'"
        )


def _bucket_size(environ: Mapping[str, str]) -> int:
    text = environ.get(env.SYNC_BUCKET_SIZE)
    if not text:
        return DEFAULT_BUCKET_SIZE
    try:
        size = whole_bytes(text)
    except ValueError:
        size = 0
    if size not in _BUCKET_SIZES:
        raise SettingsError(
            f"{env.SYNC_BUCKET_SIZE} is {text!r}; expected a quantity from 1Mi to 16Gi"
        )
    return size - size % _BUCKET_UNIT


def _required(environ: Mapping[str, str], name: str) -> str:
    value = environ.get(name)
    if not value:
        raise SettingsError(f"{name} is not set; the operator sets it in every pod of a run")
    return value


def _flag(environ: Mapping[str, str], name: str) -> bool:
    text = environ.get(name) or "false"
    if text not in ("true", "false"):
        raise SettingsError(f"{name} is {text!r}; expected true or false")
    return text == "true"


def _number(environ: Mapping[str, str], name: str, *, least: int) -> int | None:
    text = environ.get(name)
    if not text:
        return None
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise SettingsError(f"{name} is {text!r}; expected a whole number of at least {least}")
    return number


def _choice(
    environ: Mapping[str, str], name: str, kind: type[ChoiceT], default: ChoiceT
) -> ChoiceT:
    text = environ.get(name)
    if not text:
        return default
    try:
        return kind(text)
    except ValueError:
        raise SettingsError(
            f"{name} is {text!r}; expected one of {', '.join(member.value for member in kind)}"
        ) from None
