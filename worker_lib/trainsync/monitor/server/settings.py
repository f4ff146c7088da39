"""Settings of the monitor process, from its environment (names: `trainsync.api.env`)."""

import os
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TypeVar

from trainsync.api import env, names
from trainsync.api.spec import SAVE_DEADLINE_SECONDS, LogLevel, Sync, SyncMethod, Verify
from trainsync.monitor.mirror.settings import MirrorSettings
from trainsync.storage.objects.address import is_url, parse
from trainsync.storage.objects.errors import StoreUrlError
from trainsync.storage.objects.requests import bandwidth

EnumT = TypeVar("EnumT", bound=StrEnum)


class MonitorSettingsError(Exception):
    """The environment is not what it must be; the message names the variable."""


@dataclass(frozen=True)
class MonitorServerSettings:
    """See `from_environment`. Checkpoints are in ``directory``, or in the store of a URL."""

    run_name: str
    namespace: str
    run_uid: str
    directory: Path | None
    max_to_keep: int | None
    verify: Verify
    lag_allowed: int
    log_level: LogLevel
    identity: str
    save_deadline_seconds: int = SAVE_DEADLINE_SECONDS
    port: int = names.MONITOR_PORT
    mirror: MirrorSettings | None = None
    store: str | None = None
    sync_method: SyncMethod = SyncMethod.CHECKPOINT
    reading_seconds: int = Sync().timeout_seconds


def from_environment(environ: Mapping[str, str] = os.environ) -> MonitorServerSettings:
    """Read every setting.

    Raises:
        SettingsError: a variable is missing or wrong.
    """
    place = _required(environ, env.CHECKPOINT_DIR)
    keep = environ.get(env.CHECKPOINT_MAX_TO_KEEP)
    deadline = environ.get(env.CHECKPOINT_SAVE_TIMEOUT) or str(SAVE_DEADLINE_SECONDS)
    reading = environ.get(env.SYNC_TIMEOUT_SECONDS) or str(Sync().timeout_seconds)
    return MonitorServerSettings(
        run_name=_required(environ, env.RUN_NAME),
        namespace=_required(environ, env.RUN_NAMESPACE),
        run_uid=_required(environ, env.RUN_UID),
        directory=None if is_url(place) else Path(place),
        store=_store(place) if is_url(place) else None,
        max_to_keep=_positive(env.CHECKPOINT_MAX_TO_KEEP, keep) if keep else None,
        verify=_choice(Verify, environ, env.CHECKPOINT_VERIFY, Verify.SIZE),
        lag_allowed=_positive(env.SYNC_INTERVAL, environ.get(env.SYNC_INTERVAL) or "1"),
        reading_seconds=_positive(env.SYNC_TIMEOUT_SECONDS, reading),
        log_level=_choice(LogLevel, environ, env.LOG_LEVEL, LogLevel.INFO),
        # Outside a pod nothing says that a namesake is gone, so the identity is new each time.
        identity=environ.get(env.POD_NAME) or f"process-{secrets.token_hex(8)}",
        save_deadline_seconds=_positive(env.CHECKPOINT_SAVE_TIMEOUT, deadline),
        mirror=_mirror(environ),
        sync_method=_choice(SyncMethod, environ, env.SYNC_METHOD, SyncMethod.CHECKPOINT),
    )


def _store(url: str) -> str:
    try:
        return str(parse(url))
    except StoreUrlError as error:
        raise MonitorSettingsError(f"{env.CHECKPOINT_DIR}: {error}") from error


def _mirror(environ: Mapping[str, str]) -> MirrorSettings | None:
    url = environ.get(env.MIRROR_URL)
    if not url:
        return None
    every = environ.get(env.MIRROR_KEEP_EVERY)
    return MirrorSettings(
        url=url,
        endpoint=environ.get(env.MIRROR_ENDPOINT) or None,
        region=environ.get(env.MIRROR_REGION) or None,
        allow_http=environ.get(env.MIRROR_ALLOW_HTTP, "").lower() == "true",
        keep_last=_positive(env.MIRROR_KEEP_LAST, environ.get(env.MIRROR_KEEP_LAST) or "3"),
        keep_every=_positive(env.MIRROR_KEEP_EVERY, every) if every else None,
        upload_bytes_per_second=_bandwidth(environ),
    )


def _bandwidth(environ: Mapping[str, str]) -> int:
    text = environ.get(env.MIRROR_UPLOAD_BYTES_PER_SECOND)
    try:
        return bandwidth.parse(text) if text else 0
    except ValueError as error:
        raise MonitorSettingsError(f"{env.MIRROR_UPLOAD_BYTES_PER_SECOND} is {error}") from error


def _required(environ: Mapping[str, str], name: str) -> str:
    value = environ.get(name)
    if not value:
        raise MonitorSettingsError(f"{name} is not set: the operator sets it in the monitor's pod")
    return value


def _positive(name: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise MonitorSettingsError(f"{name} is {text!r}, expected a whole number of at least 1")
    return int(text)


def _choice(kind: type[EnumT], environ: Mapping[str, str], name: str, default: EnumT) -> EnumT:
    text = environ.get(name)
    if not text:
        return default
    try:
        return kind(text)
    except ValueError as error:
        known = ", ".join(member.value for member in kind)
        raise MonitorSettingsError(f"{name} is {text!r}, expected one of {known}") from error
