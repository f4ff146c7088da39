"""Whether a step that is to be saved is committed already."""

import logging

from trainsync.api.protocol import SaveKind
from trainsync.monitor.ledger.ledger import Ledger
from trainsync.monitor.ledger.saves import SaveKey
from trainsync.storage.errors import DamagedFileError, FileCheckError
from trainsync.storage.layout import RunDirectory
from trainsync.storage.saves import manifest, resume_target

_LOG = logging.getLogger(__name__)


def digest(run: RunDirectory, ledger: Ledger, key: SaveKey) -> str | None:
    """Digest of the manifest by which another owner committed the step, if it stands.

    None: no owner did, its files are damaged, or the step is trained again with other weights,
    which take the older ones' place.
    """
    info, save = ledger.info(key.kind, key.step), ledger.find(key)
    if info is None or info.owner == key.owner or (save is not None and not save.open):
        return None
    older = info.age < key.owner.age
    has_checkpoint = ledger.info(SaveKind.CHECKPOINT, key.step) is not None
    if older and key.kind is SaveKind.STATE_DICT and not has_checkpoint:
        return None
    try:
        committed = manifest.read_manifest(run, key.kind, key.step)
        manifest.check_manifest(run, committed.manifest, with_digest=False)
    except (FileNotFoundError, DamagedFileError, FileCheckError) as error:
        _LOG.warning("%s is committed but damaged, and is saved again: %s", key, error)
        return None
    return committed.digest


def digest_in_spite_of(run: RunDirectory, ledger: Ledger, run_uid: str, key: SaveKey) -> str | None:
    """Digest of the commit that stands although the owner's save at its step failed.

    As `digest`, and what the attempt resumed from when retention has taken it since: it was
    committed, and stays so for the attempt.
    """
    found = digest(run, ledger, key)
    if found is None and ledger.info(key.kind, key.step) is None:
        owner = key.owner
        return resume_target.resumed_digest(
            run, run_uid, owner.attempt, key.kind, key.step, owner.restarts
        )
    return found
