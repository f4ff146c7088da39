"""Sets a checkpoint aside whose bytes have changed, and what else at its step lists those bytes."""

import logging
from collections.abc import Callable

from trainsync.api.protocol import SaveKind
from trainsync.monitor.commit.executor import DAMAGE, SaveExecutor
from trainsync.monitor.commit.health import Unhealthy
from trainsync.monitor.commit.observer import Observer
from trainsync.monitor.resume.digest_reader import FileDamage
from trainsync.storage.errors import DamagedFileError, DanglingPointerError
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves import manifest, quarantine
from trainsync.storage.saves.manifest import Committed

_LOG = logging.getLogger(__name__)


def set_aside(
    run: RunDirectory,
    worker: SaveExecutor,
    observer: Observer,
    committed: Committed,
    wrong: FileDamage,
    gate: Callable[[], None],
) -> None:
    """Set the checkpoint ``committed`` aside, and a state dict of its step that shares the damage.

    The state dict goes first, and its pointer follows: a monitor that is killed before it comes to
    the checkpoint leaves the request, or the bytes, for which the next one reads it again. The
    checkpoint's pointer is the caller's to repair.

    Raises:
        OSError, StorageError: the volume refuses; do it again.
        NotReadyError: from ``gate``.
    """
    record = committed.manifest
    beside = _set_state_dict_aside(run, worker, observer, committed, wrong, gate)
    if manifest.set_aside(run, committed, gate):
        text = f"{record.kind} {record.step} is set aside{beside}, for its bytes have changed"
        text = f"{text}: {wrong.text}"
        _LOG.error("%s", text)
        worker.health.found(DAMAGE, text)
        observer.set_aside(record.step)
        observer.damaged(record.kind, text)
    quarantine.remove_request(run, record.step)


def _set_state_dict_aside(
    run: RunDirectory,
    worker: SaveExecutor,
    observer: Observer,
    committed: Committed,
    wrong: FileDamage,
    gate: Callable[[], None],
) -> str:
    kind, step = SaveKind.STATE_DICT, committed.manifest.step
    try:
        other = manifest.read_manifest(run, kind, step)
    except (FileNotFoundError, DamagedFileError):
        return ""
    # It would keep the checkpoint that is saved again, with other weights, out of its step.
    if wrong.files.isdisjoint(other.manifest.files) or not manifest.set_aside(run, other, gate):
        return ""
    text = f"{kind} {step} is set aside, for its bytes have changed: {wrong.text}"
    _LOG.error("%s", text)
    observer.damaged(kind, text)
    worker.ledger.uncommitted(kind, step)
    try:
        worker.repair(kind)
        worker.health.solved(f"{kind} pointer")  # that it went back is no surprise
    except DanglingPointerError as error:  # what is older is damaged, too
        worker.health.io_error(f"{kind} pointer", str(error), Unhealthy.POINTER)
    return " with the state dict that shares its files"
